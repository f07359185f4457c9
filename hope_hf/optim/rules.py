"""The update rules: AdamW, and three that orthogonalise matrices. A new one is a class here and a row in `RULES`."""

from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

# Coefficients of the quintic that moves singular values in (0, 1] to about 0.7 .. 1.2 in five steps (Jordan 2024).
QUINTIC = (3.4445, -4.7750, 2.0315)
STEPS = 5

# Root mean square of AdamW's updates in transformers (Liu et al., 2025): at this size Muon shares AdamW's rate.
UPDATE_RMS = 0.2
MUON_MOMENTUM = 0.95

# M3's averages: what each keeps in a step (the slow one: in a period), and what a gradient adds to it. The paper
# prints sums that keep all, and no numbers: the sum of 1,000 gradients hardly moves any more.
M3_PERIOD = 16
M3_FAST, M3_SLOW, M3_SQUARE = (0.95, 0.05), (0.9, 0.1 / M3_PERIOD), (0.999, 0.001)
M3_SLOW_WEIGHT = 0.2


class UpdateRule(Protocol):
    """How a group's parameters change when its clock fires. Stateless: its tensors are in the clock's state."""

    needs_matrices: bool
    """Whether it updates matrices (or stacks of them) only: AdamW updates the other parameters, and an engine must not
    cut a matrix within a row."""
    state_bytes: int
    """Bytes of the rule's tensors per element of a float32 parameter."""
    step_on_device: bool
    """Whether `step` lies on the parameter's device, and not on the CPU, where reading it waits for nothing."""

    @staticmethod
    def settings(betas: tuple[float, float], eps: float) -> dict:
        """The rule's own keys of a group, besides `lr` and `weight_decay`, from the flags of the run."""

    @staticmethod
    def initial_state(parameter: Tensor) -> dict[str, Tensor]:
        """The rule's own tensors for one parameter before its first step, each shaped and typed as the parameter."""

    @staticmethod
    def update(parameters: list[Tensor], gradients: list[Tensor], states: list[dict[str, Tensor]], group: dict):
        """Change `parameters` and `states` in place by one step and add 1 to each state's `step`."""


class AdamWRule:
    """AdamW with decoupled weight decay, bit-equal to `torch.optim.AdamW(fused=True)`."""

    needs_matrices = False
    state_bytes = 8
    # torch's fused kernels read it there.
    step_on_device = True

    @staticmethod
    def settings(betas: tuple[float, float], eps: float) -> dict:
        return {"betas": betas, "eps": eps}

    @staticmethod
    def initial_state(parameter: Tensor) -> dict[str, Tensor]:
        return {"exp_avg": torch.zeros_like(parameter), "exp_avg_sq": torch.zeros_like(parameter)}

    @staticmethod
    def update(parameters: list[Tensor], gradients: list[Tensor], states: list[dict[str, Tensor]], group: dict):
        beta1, beta2 = group["betas"]
        # Fused is the fastest on a CPU, too: 8 ms for 10 M parameters on two cores; foreach takes 29 ms, a loop 39 ms.
        # Element-wise: each process updates its own part of a sharded parameter.
        adamw(
            [own_part(parameter) for parameter in parameters],
            [own_part(gradient) for gradient in gradients],
            [own_part(state["exp_avg"]) for state in states],
            [own_part(state["exp_avg_sq"]) for state in states],
            [],
            [state["step"] for state in states],
            fused=True,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


class MuonRule:
    """Nesterov momentum, orthogonalised, scaled to the size of an AdamW update, with decoupled weight decay.

    The last two axes of a parameter are a matrix; leading axes are batched.
    """

    needs_matrices = True
    state_bytes = 4
    step_on_device = False

    @staticmethod
    def settings(betas: tuple[float, float], eps: float) -> dict:
        return {"momentum": MUON_MOMENTUM}

    @staticmethod
    def initial_state(parameter: Tensor) -> dict[str, Tensor]:
        return {"momentum_buffer": torch.zeros_like(parameter)}

    @staticmethod
    def update(parameters: list[Tensor], gradients: list[Tensor], states: list[dict[str, Tensor]], group: dict):
        for parameter, gradient, state in zip(parameters, gradients, states, strict=True):
            state["step"] += 1
            gradient = own_part(gradient)
            buffer = own_part(state["momentum_buffer"]).lerp_(gradient, 1 - group["momentum"])
            direction = by_whole_matrices(newton_schulz, parameter, gradient.lerp(buffer, group["momentum"]))
            _descend(parameter, direction, _scale(parameter), group)


class DeltaMomentumRule:
    """Muon whose momentum forgets along a new gradient what it had there (Nested Learning, equations 49 and 52).

    `m = m (alpha - u^T u) + g` for a gradient g [..., rows, columns] and u = g / |g|; the update is
    `newton_schulz(m)`. Equation (49) has g in place of u: it forgets nothing where gradients are small (their norm is
    clipped at 1), and diverges where they are large.
    """

    needs_matrices = True
    state_bytes = 4
    step_on_device = False
    settings = MuonRule.settings
    initial_state = MuonRule.initial_state

    @staticmethod
    def update(parameters: list[Tensor], gradients: list[Tensor], states: list[dict[str, Tensor]], group: dict):
        remember = partial(_remember, keeps=group["momentum"])
        for parameter, gradient, state in zip(parameters, gradients, states, strict=True):
            state["step"] += 1
            buffer = own_part(state["momentum_buffer"])
            buffer.copy_(by_whole_matrices(remember, parameter, buffer, own_part(gradient)))
            _descend(parameter, by_whole_matrices(newton_schulz, parameter, buffer), _scale(parameter), group)


def _remember(momentum: Tensor, gradient: Tensor, keeps: float) -> Tensor:
    """`m (alpha - u^T u) + g` for matrices [..., rows, columns], with alpha `keeps`."""
    u = gradient / gradient.norm(dim=(-2, -1), keepdim=True).clamp(min=torch.finfo(gradient.dtype).tiny)
    return keeps * momentum - momentum @ u.mT @ u + gradient


class M3Rule:
    """Multi-scale momentum (Nested Learning, algorithm 1): a fast and a slow momentum, each orthogonalised.

    The update is `(O1 + slow_weight O2) / (sqrt(V) + eps)`: O1 of the fast momentum, in each step; O2 of the slow one,
    every `period` steps, of all gradients up to then; V the average of squared gradients. It is scaled to the size of
    an AdamW update; `update_rms` None leaves it as printed, and the averages `(1, beta)` are the printed sums.
    """

    needs_matrices = True
    state_bytes = 16
    step_on_device = False
    state_names = ("momentum_buffer", "slow_momentum", "slow_direction", "exp_avg_sq")

    @staticmethod
    def settings(betas: tuple[float, float], eps: float) -> dict:
        return {
            "fast": M3_FAST, "slow": M3_SLOW, "square": M3_SQUARE, "slow_weight": M3_SLOW_WEIGHT, "period": M3_PERIOD,
            "update_rms": UPDATE_RMS, "eps": eps,
        }  # fmt: skip

    @staticmethod
    def initial_state(parameter: Tensor) -> dict[str, Tensor]:
        return {name: torch.zeros_like(parameter) for name in M3Rule.state_names}

    @staticmethod
    def update(parameters: list[Tensor], gradients: list[Tensor], states: list[dict[str, Tensor]], group: dict):
        keeps_fast, adds_fast = group["fast"]
        keeps_slow, adds_slow = group["slow"]
        keeps_square, adds_square = group["square"]
        for parameter, gradient, state in zip(parameters, gradients, states, strict=True):
            gradient = own_part(gradient)
            fast, slow, slow_direction, square = (own_part(state[name]) for name in M3Rule.state_names)
            if int(state["step"]) % group["period"] == 0:
                slow_direction.copy_(by_whole_matrices(newton_schulz, parameter, slow))
                slow.mul_(keeps_slow)
            state["step"] += 1
            slow.add_(gradient, alpha=adds_slow)
            fast.mul_(keeps_fast).add_(gradient, alpha=adds_fast)
            square.mul_(keeps_square).addcmul_(gradient, gradient, value=adds_square)
            direction = by_whole_matrices(newton_schulz, parameter, fast)
            direction.add_(slow_direction, alpha=group["slow_weight"])
            direction.div_(square.sqrt().add_(group["eps"]))
            if group["update_rms"] is not None:
                resize = partial(_resize, rms=group["update_rms"])
                direction = by_whole_matrices(resize, parameter, direction)
            _descend(parameter, direction, 1.0, group)


def _resize(direction: Tensor, rms: float) -> Tensor:
    """Matrices [..., rows, columns] with the root mean square `rms`."""
    size = direction.square().mean((-2, -1), keepdim=True).sqrt()
    return direction * (rms / size.clamp(min=torch.finfo(direction.dtype).tiny))


RULES: dict[str, type[UpdateRule]] = {
    "adamw": AdamWRule, "muon": MuonRule, "m3": M3Rule, "delta_momentum": DeltaMomentumRule
}  # fmt: skip
"""By the values of `--optimizer`."""


def _scale(parameter: Tensor) -> float:
    """What gives an orthogonal [..., rows, columns] matrix the size of an AdamW update."""
    # Its root mean square is 1 / sqrt(max(rows, columns)).
    return UPDATE_RMS * max(parameter.shape[-2:]) ** 0.5


def _descend(parameter: Tensor, direction: Tensor, scale: float, group: dict):
    """Subtract this process's part of a direction, after decoupled weight decay."""
    own = own_part(parameter)
    own.mul_(1 - group["lr"] * group["weight_decay"])
    own.add_(direction, alpha=-group["lr"] * scale)


def newton_schulz(matrices: Tensor, dtype: torch.dtype | None = None, eps: float = 1e-7) -> Tensor:
    """Approximate U V^T of the singular value decomposition U S V^T of each matrix.

    Args:
        matrices: [..., rows, columns]; every leading index is a separate matrix (a head, an expert).
        dtype: of the computation. Default: bfloat16 on an accelerator, where it is fastest; the input's own (at least
            float32) on the CPU, where bfloat16 may be ten times slower and its rounding (1e-4 in the loss) hides
            whether two launches compute the same.
        eps: lower bound of the norm by which a matrix is scaled, so that a zero matrix stays zero.

    Returns:
        [..., rows, columns] in the input's dtype; singular values between about 0.7 and 1.2, none exactly 1.
    """
    if dtype is None:
        dtype = torch.promote_types(matrices.dtype, torch.float32) if matrices.device.type == "cpu" else torch.bfloat16
    # The products below have the size of the smaller side squared.
    tall = matrices.size(-2) > matrices.size(-1)
    x = (matrices.mT if tall else matrices).to(dtype)
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=eps)
    a, b, c = QUINTIC
    for _ in range(STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if tall else x).to(matrices.dtype)


def own_part(tensor: Tensor) -> Tensor:
    """This process's part of a sharded tensor, sharing its memory; the tensor itself if it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def by_whole_matrices(function: Callable[..., Tensor], parameter: Tensor, *parts: Tensor) -> Tensor:
    """This process's part of `function`, applied to whole matrices or stacks of whole matrices sharded by rows.

    Args:
        function: of tensors [..., rows, columns], keeps their shape and dtype; what it returns for a matrix depends on
            no other matrix of a stack.
        parameter: shaped and sharded as the function's arguments are.
        parts: this process's part of each argument.
    """
    if not isinstance(parameter, DTensor):
        return function(*parts)
    (chunk,) = parameter.__create_chunk_list__()
    assert chunk.sizes[1:] == parameter.shape[1:], "sharded along another axis than the first"
    if parameter.ndim > 2:
        # A stack is sharded between its matrices.
        return function(*parts) if parts[0].numel() else parts[0]
    whole = []
    for part in parts:
        sharded = DTensor.from_local(
            part,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
        whole.append(sharded.full_tensor())
    first_row = chunk.offsets[0]
    return function(*whole)[first_row : first_row + chunk.sizes[0]]
