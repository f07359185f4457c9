"""Operators on fake tensors, which run as they would on real ones."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_impls import op_implementations_checks
from torch._subclasses.fake_tensor import (
    FakeTensor,
    FakeTensorMode,
    in_kernel_invocation_manager,
    unset_fake_temporarily,
)
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

aten = torch.ops.aten
CPU = torch.device("cpu")
# Operators for which `FakeTensorMode` has rules that sizes without a number or several devices need.
WITHOUT_NEED = {
    aten._unsafe_view.default, aten.copy_.default, aten.embedding.default, aten.select.int, aten.slice.Tensor,
    aten.view.default,
}  # fmt: skip


@contextmanager
def as_if_real(fake: FakeTensorMode, model: PreTrainedModel, tokens: int, in_place: bool) -> Iterator[None]:
    """Run a step of `model` on fake tensors, of texts of `tokens` tokens.

    `in_place`: whether the two gradients of a tied embedding are added in place; under FSDP both exist at once.
    """
    config = model.config
    real = _AsIfReal(fake)
    if config.model_type == "hope":
        # Queries are padded to whole blocks.
        real.queries = tokens + -tokens % config.sparse_block_size
    if in_place:
        real.embedding = model.get_input_embeddings().weight.shape
    # Parts of torch warn because they expect real tensors.
    with warnings.catch_warnings(action="ignore"), fake, real:
        yield


def is_in_backward() -> bool:
    """Whether this code runs inside a backward pass."""
    return torch._C._current_graph_task_id() != -1


class _AsIfReal(TorchDispatchMode):
    """Replaces operations that need the numbers of a tensor.

    - A boolean mask selects no elements, so checks of values (such as token ids) find nothing.
    - All `queries` of a row select the first block of sparse attention, as in every text, and no other block.
    - The two gradients of a tied `embedding` of this shape are added in place, as autograd does with real tensors.
    """

    embedding: torch.Size | None = None
    queries: int = 0

    def __init__(self, fake: FakeTensorMode):
        super().__init__()
        self.fake = fake
        self._replaced = {
            aten.add.Tensor: self._add,
            aten.bincount.default: self._count,
            aten.index.Tensor: self._index,
            aten._local_scalar_dense.default: self._number,
        }

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        replaced = self._replaced.get(function)
        if replaced is None:
            return self._run(function, args, kwargs)
        return replaced(*args, **kwargs)

    def _run(self, function, args: tuple, kwargs: dict):
        """The result of an operator; without `FakeTensorMode`, whose checks take most of its time, where it can be."""
        values = (*args, *kwargs.values())
        if not (_is_as_of_meta(function) and _are_fake(values)):
            return function(*args, **kwargs)
        with in_kernel_invocation_manager(self.fake):
            result = function(*args, **kwargs)
        if isinstance(result, tuple | list):
            return type(result)(map(self._faked, result))
        return self._faked(result)

    def _faked(self, result):
        """A new meta tensor as a fake tensor; any other result as it is."""
        if not isinstance(result, Tensor) or isinstance(result, FakeTensor):
            return result
        return FakeTensor(self.fake, result, CPU)

    def _add(self, first: Tensor, second, **kwargs) -> Tensor:
        is_gradient = is_in_backward() and isinstance(second, Tensor)
        if is_gradient and first.shape == second.shape == self.embedding:
            return aten.add_.Tensor(first, second, **kwargs)
        return self._run(aten.add.Tensor, (first, second), kwargs)

    def _index(self, tensor: Tensor, indices: list[Tensor | None]) -> Tensor:
        mask = _single_mask(indices)
        if mask is not None:
            return tensor.new_empty((0, *tensor.shape[mask.ndim :]))
        return aten.index.Tensor(tensor, indices)

    def _count(self, numbers: Tensor, weights: Tensor | None = None, bins: int = 0) -> Tensor:
        """How many queries select each block; the last bin counts queries without a block."""
        if not self.queries:
            return aten.bincount.default(numbers, weights, bins)
        with unset_fake_temporarily():
            counts = torch.zeros(bins, dtype=torch.long)
            counts[0] = min(self.queries, numbers.numel())
            counts[-1] = numbers.numel() - counts[0]
            return counts

    def _number(self, tensor: Tensor) -> bool | float | int:
        if tensor.dtype is torch.bool:
            return False
        return 1.0 if tensor.is_floating_point() else 1


@cache
def _is_as_of_meta(function) -> bool:
    """Whether all that `FakeTensorMode` knows of an operator is that results are those of meta tensors."""
    if not isinstance(function, OpOverload) or function.namespace != "aten":
        return False
    if function in WITHOUT_NEED:
        return True
    takes_device = any(argument.name == "device" for argument in function._schema.arguments)
    has_kernel = torch._C._dispatch_has_computed_kernel_for_dispatch_key(function.name(), "Meta")
    if takes_device or not has_kernel or torch.Tag.inplace_view in function.tags:
        return False
    return not any(has_rule(function) for has_rule, _ in op_implementations_checks)


def _are_fake(values: tuple) -> bool:
    """Whether the tensors among an operator's arguments are fake and without the numbers of a constant."""
    tensors = 0
    for value in values:
        members = value if isinstance(value, list | tuple) else (value,)
        for part in members:
            if isinstance(part, Tensor):
                if type(part) is not FakeTensor or part.constant is not None:
                    return False
                tensors += 1
    return tensors > 0


def _single_mask(indices: list[Tensor | None]) -> Tensor | None:
    """The boolean mask, if it is the only index."""
    tensors = [index for index in indices if index is not None]
    if len(tensors) != 1:
        return None
    (tensor,) = tensors
    return tensor if tensor.dtype is torch.bool else None
