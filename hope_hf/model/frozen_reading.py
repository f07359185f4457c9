"""Reading with frozen memories: tokens read what memories hold, and no memory writes or forgets."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import nn

# The models that this thread (or asynchronous task) reads with frozen memories.
_FROZEN: ContextVar[frozenset[nn.Module]] = ContextVar("frozen_memories", default=frozenset())


def reads_frozen(trunk: nn.Module, asked: bool | None = None) -> bool:
    """Whether a call of a trunk is frozen: as it is `asked`, else if it is inside `frozen_memories`."""
    # the tracer cannot read a context variable
    if asked is not None or torch.compiler.is_compiling():
        return bool(asked)
    return trunk in _FROZEN.get()


class FreezesMemories:
    """Models whose memories can stay as they are during a call."""

    @contextmanager
    def frozen_memories(self) -> Iterator[None]:
        """Inside, this thread reads with frozen memories; other threads do not. See `hope_hf.frozen_memories`."""
        token = _FROZEN.set(_FROZEN.get() | {self.base_model})
        try:
            yield
        finally:
            _FROZEN.reset(token)
