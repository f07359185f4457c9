"""Parameters that are shared out between processes by rows (FSDP2): the own part, and whole matrices."""

from torch import Tensor
from torch.distributed.tensor import DTensor


def own_part(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor, sharing its memory; the tensor itself where it is not shared out."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
