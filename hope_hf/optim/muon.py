"""Muon: momentum, orthogonalised matrix by matrix."""

import torch
from torch import Tensor

from .sharding import by_whole_matrices, own_part

# The quintic that drives every singular value in (0, 1] to about 0.7 .. 1.2 in five steps (Jordan et al., 2024).
QUINTIC = (3.4445, -4.7750, 2.0315)
STEPS = 5

# Root mean square of AdamW's updates in transformers (Liu et al., 2025): at this size Muon shares AdamW's rate.
UPDATE_RMS = 0.2


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


class MuonRule:
    """Nesterov momentum, orthogonalised, scaled to the size of an AdamW update, with decoupled weight decay.

    Only for parameters whose last two axes are a matrix; leading axes are batched.
    Group keys: `lr` (AdamW's own), `momentum`, `weight_decay`.
    State: `momentum_buffer`, shaped and typed as the parameter; `step` comes from the clock.
    """

    @staticmethod
    def initial_state(parameter: Tensor) -> dict[str, Tensor]:
        """Momentum at zero for one parameter [..., rows, columns]."""
        return {"momentum_buffer": torch.zeros_like(parameter)}

    @staticmethod
    def update(parameters: list[Tensor], gradients: list[Tensor], states: list[dict[str, Tensor]], group: dict):
        """Change `parameters` and `states` in place by one step."""
        for parameter, gradient, state in zip(parameters, gradients, states, strict=True):
            state["step"] += 1
            own, gradient = own_part(parameter), own_part(gradient)
            buffer = own_part(state["momentum_buffer"]).lerp_(gradient, 1 - group["momentum"])
            direction = by_whole_matrices(newton_schulz, gradient.lerp(buffer, group["momentum"]), parameter)
            # An orthogonal [r, c] matrix has a root mean square of 1 / sqrt(max(r, c)).
            scale = UPDATE_RMS * max(parameter.shape[-2:]) ** 0.5
            own.mul_(1 - group["lr"] * group["weight_decay"])
            own.add_(direction, alpha=-group["lr"] * scale)
