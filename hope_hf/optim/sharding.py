"""Parameters that are shared out between processes by rows (FSDP2): the own part, and whole matrices."""

from collections.abc import Callable

from torch import Tensor
from torch.distributed.tensor import DTensor


def own_part(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor, sharing its memory; the tensor itself where it is not shared out."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def by_whole_matrices(function: Callable[[Tensor], Tensor], part: Tensor, parameter: Tensor) -> Tensor:
    """This process's part of `function` of a matrix, or of a stack of matrices, each of them whole.

    Args:
        function: of [..., rows, columns], shape and dtype kept; what it gives for a matrix depends on no other one.
        part: what this process holds of the function's argument.
        parameter: shaped and shared out as the argument is.
    """
    if not isinstance(parameter, DTensor):
        return function(part)
    (chunk,) = parameter.__create_chunk_list__()
    if chunk.sizes[1:] == parameter.shape[1:] and parameter.ndim > 2:
        # A stack is cut between its matrices.
        return function(part) if part.numel() else part
    assert chunk.sizes[1:] == parameter.shape[1:], "shared out along another axis than the first"
    shared = DTensor.from_local(
        part,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    return function(shared.full_tensor())[chunk.offsets[0] : chunk.offsets[0] + chunk.sizes[0]]
