"""Parameters of a model on the meta device: shape and dtype without values."""

import torch
from torch import nn


def is_on_meta(model: nn.Module) -> bool:
    """Whether any parameter of a model has no values."""
    return any(parameter.is_meta for parameter in model.parameters())


def like(parameter: nn.Parameter, device: torch.device | str, dtype: torch.dtype | None = None) -> nn.Parameter:
    """A parameter of this shape without its values, with the marks that families put on parameters."""
    other = nn.Parameter(
        torch.empty_like(parameter, device=device, dtype=dtype), requires_grad=parameter.requires_grad
    )
    other.__dict__.update(parameter.__dict__)
    return other


def make_real(parameter: nn.Parameter, device: torch.device, dtype: torch.dtype | None = None) -> None:
    """Give it memory, without values. It stays the same object, by which tied weights and optimizers know it."""
    torch.utils.swap_tensors(parameter, like(parameter, device, dtype))
