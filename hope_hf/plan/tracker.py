"""The bytes of the tensors that live, counted operator by operator."""

import weakref
from collections import Counter

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Tracker(TorchDispatchMode):
    """Counts the bytes of the tensors that are made while it is on and still live.

    Attributes:
        live: bytes now.
        owned: of them, bytes by `owner`, the part of the model that was running.
        peaks: the largest `live` of each `phase`.
        operators: how many ran.
    """

    def __init__(self, others: list[Tensor]):
        """`others`: tensors that are not counted, such as weights."""
        super().__init__()
        self.live = 0
        self.operators = 0
        self.owner = "ends"
        self.phase = "ends"
        self.owned: Counter[str] = Counter()
        self.peaks: Counter = Counter()
        # Of each storage, by its address, its owner and bytes.
        self._storages: dict[int, tuple[str, int]] = {}
        for tensor in others:
            self._storages[tensor.untyped_storage()._cdata] = ("", 0)

    def enter(self, phase) -> None:
        """What is counted from now on belongs to the peak of this phase."""
        self.phase = phase
        self.peaks[phase] = max(self.peaks[phase], self.live)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.prim.device.default:
            # Half of all calls: code asks where a tensor lies, which a fake one says by itself.
            return args[0].fake_device
        self.operators += 1
        result = function(*args, **(kwargs or {}))
        results = result if isinstance(result, tuple | list) else (result,)
        for tensor in results:
            if isinstance(tensor, Tensor):
                self._count(tensor)
        if self.live > self.peaks[self.phase]:
            self.peaks[self.phase] = self.live
        return result

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address in self._storages:
            return
        size = storage.nbytes()
        self._storages[address] = (self.owner, size)
        self.owned[self.owner] += size
        self.live += size
        weakref.finalize(storage, self._forget, address)

    def _forget(self, address: int) -> None:
        owner, size = self._storages.pop(address)
        self.owned[owner] -= size
        self.live -= size
