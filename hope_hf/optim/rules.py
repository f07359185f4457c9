"""The update rules: AdamW, and three that orthogonalise matrices. A new one is a class here and a row in `RULES`."""

from collections.abc import Callable, Iterable
from functools import partial
from operator import itemgetter
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

State = dict[str, Tensor]
"""The tensors of one parameter by name: the clock's and the rule's."""

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
    state_names: tuple[str, ...]
    """The rule's own tensors of one parameter, each shaped and typed as the parameter; they begin with zeros."""
    step_on_device: bool
    """Whether `step` lies on the parameter's device, and not on the CPU, where reading it waits for nothing."""

    @staticmethod
    def settings(betas: tuple[float, float], eps: float) -> dict:
        """The rule's own keys of a group, besides `lr` and `weight_decay`, from the flags of the run."""

    @classmethod
    def update(cls, parameters: list[Tensor], gradients: list[Tensor], states: list[State], group: dict):
        """Change `parameters` and `states` in place by one step and add 1 to each state's `step`."""


class AdamWRule:
    """AdamW with decoupled weight decay, bit-equal to `torch.optim.AdamW(fused=True)`."""

    needs_matrices = False
    state_names = ("exp_avg", "exp_avg_sq")
    # torch's fused kernels read it there.
    step_on_device = True

    @staticmethod
    def settings(betas: tuple[float, float], eps: float) -> dict:
        return {"betas": betas, "eps": eps}

    @classmethod
    def update(cls, parameters: list[Tensor], gradients: list[Tensor], states: list[State], group: dict):
        beta1, beta2 = group["betas"]
        # Fused is the fastest on a CPU, too: 8 ms for 10 M parameters on two cores; foreach takes 29 ms, a loop 39 ms.
        # Element-wise: each process updates its own part of a sharded parameter.
        adamw(
            params=_own_parts(parameters),
            grads=_own_parts(gradients),
            exp_avgs=_own_parts(map(itemgetter("exp_avg"), states)),
            exp_avg_sqs=_own_parts(map(itemgetter("exp_avg_sq"), states)),
            max_exp_avg_sqs=[],
            state_steps=list(map(itemgetter("step"), states)),
            fused=True,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


class MatrixRule:
    """A rule that moves each parameter along a direction, after decoupled weight decay.

    The last two axes of a parameter are a matrix; leading axes are batched.
    """

    needs_matrices = True
    step_on_device = False

    @classmethod
    def direction(cls, parameter: Tensor, gradient: Tensor, state: State, group: dict) -> Tensor:
        """This process's part of the direction, shaped as `gradient`; the averages in `state` take `gradient` in."""
        raise NotImplementedError

    @classmethod
    def scale(cls, parameter: Tensor) -> float:
        """What gives an orthogonal [..., rows, columns] matrix the size of an AdamW update."""
        # Its root mean square is 1 / sqrt(max(rows, columns)).
        return UPDATE_RMS * max(parameter.shape[-2:]) ** 0.5

    @classmethod
    def update(cls, parameters: list[Tensor], gradients: list[Tensor], states: list[State], group: dict):
        for parameter, gradient, state in zip(parameters, gradients, states, strict=True):
            direction = cls.direction(parameter, own_part(gradient), state, group)
            part = own_part(parameter)
            part.mul_(1 - group["lr"] * group["weight_decay"])
            part.add_(direction, alpha=-group["lr"] * cls.scale(parameter))
            state["step"] += 1


class MuonRule(MatrixRule):
    """Nesterov momentum, orthogonalised, scaled to the size of an AdamW update."""

    state_names = ("momentum_buffer",)

    @staticmethod
    def settings(betas: tuple[float, float], eps: float) -> dict:
        return {"momentum": MUON_MOMENTUM}

    @classmethod
    def direction(cls, parameter: Tensor, gradient: Tensor, state: State, group: dict) -> Tensor:
        momentum = own_part(state["momentum_buffer"])
        momentum.lerp_(gradient, 1 - group["momentum"])
        nesterov = gradient.lerp(momentum, group["momentum"])
        return by_whole_matrices(newton_schulz, parameter, nesterov)


class DeltaMomentumRule(MuonRule):
    """Muon whose momentum forgets along a new gradient what it had there (Nested Learning, equations 49 and 52).

    `m = m (alpha - u^T u) + g` for a gradient g [..., rows, columns] and u = g / |g|; the update is
    `newton_schulz(m)`. Equation (49) has g in place of u: it forgets nothing where gradients are small (their norm is
    clipped at 1), and diverges where they are large.
    """

    @classmethod
    def direction(cls, parameter: Tensor, gradient: Tensor, state: State, group: dict) -> Tensor:
        remember = partial(_remember, keeps=group["momentum"])
        momentum = own_part(state["momentum_buffer"])
        momentum.copy_(by_whole_matrices(remember, parameter, momentum, gradient))
        return by_whole_matrices(newton_schulz, parameter, momentum)


def _remember(momentum: Tensor, gradient: Tensor, keeps: float) -> Tensor:
    """`m (alpha - u^T u) + g` for matrices [..., rows, columns], with alpha `keeps`."""
    norm = gradient.norm(dim=(-2, -1), keepdim=True)
    u = gradient / norm.clamp(min=torch.finfo(gradient.dtype).tiny)
    return keeps * momentum - momentum @ u.mT @ u + gradient


class M3Rule(MatrixRule):
    """Multi-scale momentum (Nested Learning, algorithm 1): a fast and a slow momentum, each orthogonalised.

    The update is `(O1 + slow_weight O2) / (sqrt(V) + eps)`: O1 of the fast momentum, in each step; O2 of the slow one,
    every `period` steps, of all gradients up to then; V the average of squared gradients. It is scaled to the size of
    an AdamW update; `update_rms` None leaves it as printed, and the averages `(1, beta)` are the printed sums.
    """

    state_names = ("momentum_buffer", "slow_momentum", "slow_direction", "exp_avg_sq")

    @staticmethod
    def settings(betas: tuple[float, float], eps: float) -> dict:
        return {
            "fast": M3_FAST, "slow": M3_SLOW, "square": M3_SQUARE, "slow_weight": M3_SLOW_WEIGHT, "period": M3_PERIOD,
            "update_rms": UPDATE_RMS, "eps": eps,
        }  # fmt: skip

    @classmethod
    def scale(cls, parameter: Tensor) -> float:
        return 1.0

    @classmethod
    def direction(cls, parameter: Tensor, gradient: Tensor, state: State, group: dict) -> Tensor:
        fast, slow, slow_direction, square = _own_parts(map(state.get, cls.state_names))
        if int(state["step"]) % group["period"] == 0:
            slow_direction.copy_(by_whole_matrices(newton_schulz, parameter, slow))
            slow.mul_(group["slow"][0])
        slow.add_(gradient, alpha=group["slow"][1])
        keeps, adds = group["fast"]
        fast.mul_(keeps).add_(gradient, alpha=adds)
        keeps, adds = group["square"]
        square.mul_(keeps).addcmul_(gradient, gradient, value=adds)
        direction = by_whole_matrices(newton_schulz, parameter, fast)
        direction.add_(slow_direction, alpha=group["slow_weight"])
        direction.div_(square.sqrt().add_(group["eps"]))
        if group["update_rms"] is None:
            return direction
        resize = partial(_resize, rms=group["update_rms"])
        return by_whole_matrices(resize, parameter, direction)


def _resize(direction: Tensor, rms: float) -> Tensor:
    """Matrices [..., rows, columns] with the root mean square `rms`."""
    size = direction.square().mean((-2, -1), keepdim=True).sqrt()
    return direction * (rms / size.clamp(min=torch.finfo(direction.dtype).tiny))


RULES: dict[str, type[UpdateRule]] = {
    "adamw": AdamWRule,
    "muon": MuonRule,
    "m3": M3Rule,
    "delta_momentum": DeltaMomentumRule,
}
"""By the values of `--optimizer`."""


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
        dtype = torch.bfloat16
        if matrices.device.type == "cpu":
            dtype = torch.promote_types(matrices.dtype, torch.float32)
    if matrices.size(-2) > matrices.size(-1):
        # The products below have the size of the smaller side squared.
        return newton_schulz(matrices.mT, dtype, eps).mT
    x = matrices.to(dtype)
    norm = x.norm(dim=(-2, -1), keepdim=True)
    x = x / norm.clamp(min=eps)
    a, b, c = QUINTIC
    for _ in range(STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.to(matrices.dtype)


def own_part(tensor: Tensor) -> Tensor:
    """This process's part of a sharded tensor, sharing its memory; the tensor itself if it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _own_parts(tensors: Iterable[Tensor]) -> list[Tensor]:
    return list(map(own_part, tensors))


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
    shard = partial(
        DTensor.from_local,
        device_mesh=parameter.device_mesh,
        placements=parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    whole = [shard(part).full_tensor() for part in parts]
    return function(*whole).narrow(0, start=chunk.offsets[0], length=chunk.sizes[0])
