"""Parameters sharded by rows (FSDP2): a process's own part, and whole matrices."""

from collections.abc import Callable

from torch import Tensor
from torch.distributed.tensor import DTensor


def own_part(tensor: Tensor) -> Tensor:
    """This process's part of a tensor, sharing its memory; the tensor itself if it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def by_whole_matrices(function: Callable[[Tensor], Tensor], part: Tensor, parameter: Tensor) -> Tensor:
    """This process's part of `function`, applied to a whole matrix or a stack of whole matrices.

    Args:
        function: of [..., rows, columns], keeps shape and dtype; its result for a matrix depends on no other matrix.
        part: this process's part of the function's argument.
        parameter: shaped and sharded as the argument is.
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
