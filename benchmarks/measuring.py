"""Measurements of a step, a token, a cache, peak memory and operators, in which models take turns."""

import json
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TextIO
from unittest.mock import patch

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import DynamicCache

from hope_hf import CACHE_NAME
from hope_hf.common.objective import can_skip_logits, summed_loss
from hope_hf.model.archive import Archive

# Operators that only return a view of a tensor, or allocate one.
VIEWS = frozenset(
    "view _unsafe_view expand slice select transpose permute unsqueeze squeeze t alias detach as_strided split "
    "split_with_sizes unbind diagonal unfold empty empty_like empty_strided new_empty new_empty_strided "
    "_local_scalar_dense device promote_types".split()
)


def seconds(function: Callable[[], object], device: str = "cpu") -> float:
    """CPU seconds of a call, all threads together; wall-clock seconds on a GPU."""
    if device == "cpu":
        start = time.process_time()
        function()
        return time.process_time() - start
    torch.cuda.synchronize()
    start = time.perf_counter()
    function()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def in_turn(measures: dict, rounds: int, refused: Callable[[str, Exception], None] | None = None) -> dict:
    """The results of each function of `measures` in `rounds` rounds after a warm-up round [name: values].

    A function that raises an error is left out, and `refused` gets its name and error; without `refused` the error is
    raised. Compilers of kernels have errors of their own kinds.
    """
    values = {name: [] for name in measures}
    for _ in range(rounds + 1):
        for name in list(values):
            try:
                values[name].append(measures[name]())
            except Exception as error:
                if refused is None:
                    raise
                refused(name, error)
                del values[name]
    return {name: found[1:] for name, found in values.items()}


def train_step(network: nn.Module, input_ids: torch.Tensor, **inputs) -> None:
    """Forward and backward pass as in the trainer; `inputs` are further arguments of the model."""
    network.train()
    inputs |= {"input_ids": input_ids, "use_cache": False}
    loss = summed_loss(network, inputs, input_ids, can_skip_logits(network))
    (loss / input_ids.numel()).backward()
    network.zero_grad()


def halved(run: Callable[[torch.Tensor], object], rows: torch.Tensor) -> torch.Tensor:
    """The rows, halved until `run(rows)` fits the GPU's memory; the error if a single row does not."""
    while True:
        try:
            run(rows)
            return rows
        except torch.OutOfMemoryError:
            if len(rows) == 1:
                raise
        # only here the error has let go of the tensors of its frames
        rows = rows[: len(rows) // 2]
        torch.cuda.empty_cache()


def append_row(file: Path, row: dict, stream: TextIO) -> None:
    """Append a row to a file of JSON lines, and print its values."""
    print(" ".join(str(cell) for cell in row.values()), file=stream, flush=True)
    with file.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(row) + "\n")


def first_line(error: Exception) -> str:
    """The kind of an error and the beginning of what it says, for a row of notes."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:120]}"


class CountingCache(DynamicCache):
    """A cache for models without softmax attention: transformers' cache counts tokens in such layers, or raises."""

    read = 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.read

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.read + query_length, 0


class Decoder:
    """Greedy decoding of one row. The first call reads the context, every other call one token.

    Args:
        cache: to read into, by default the network's own.
    """

    def __init__(self, network: nn.Module, context: torch.Tensor, cache=None):
        self.network, self.token, self.cache = network, context, cache
        # not at each text: it passes through all modules, and is no part of reading
        if network.training:
            network.eval()
        # Mamba-2 names this argument differently before transformers 5.24.
        is_mamba = network.config.model_type == "mamba2"
        self.name = "cache_params" if is_mamba and CACHE_NAME == "past_key_values" else CACHE_NAME
        layers = set(getattr(network.config, "layer_types", ()))
        if cache is None and layers == {"linear_attention"} and not is_mamba:
            self.cache = CountingCache(config=network.config)

    @torch.no_grad()
    def __call__(self) -> None:
        outputs = self.network(self.token, **{self.name: self.cache}, use_cache=True, logits_to_keep=1)
        if isinstance(self.cache, CountingCache):
            self.cache.read += self.token.shape[1]
        self.token, self.cache = outputs.logits[:, -1:].argmax(-1), outputs[self.name]


def read(network: nn.Module, context: torch.Tensor) -> None:
    """Read a text into a new cache."""
    Decoder(network, context)()


def held_bytes(cache) -> int:
    """Bytes of all tensors that a cache of any kind refers to, each storage once, without a HOPE's archive.

    No call reads the archive: it holds words for a search, and could be elsewhere.
    """
    storages, seen, pending = {}, set(), [cache]
    while pending:
        part = pending.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        if isinstance(part, torch.Tensor):
            storage = part.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        elif isinstance(part, Archive):
            continue
        elif isinstance(part, dict):
            pending.extend(part.values())
        elif isinstance(part, (list, tuple)):
            pending.extend(part)
        elif type(part).__module__.startswith(("transformers.", "hope_hf.", "benchmarks.", "__main__")):
            pending.extend(vars(part).values())
    return sum(storages.values())


def peak_growth(function: Callable[[], object]) -> int:
    """Largest growth of this process's memory in bytes while the function runs (Linux)."""
    # resets the recorded peak to the current memory
    Path("/proc/self/clear_refs").write_text("5")
    before = resident_kib("VmRSS")
    function()
    return (resident_kib("VmHWM") - before) * 1024


def resident_kib(field: str) -> int:
    """KiB that Linux counts for this process: `VmRSS`, or `VmHWM` for the peak."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1])


class Calls(TorchDispatchMode):
    """Counts the operators that run inside, except views."""

    def __init__(self):
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.number += function.overloadpacket.__name__ not in VIEWS
        return function(*args, **(kwargs or {}))


class Traffic(Calls):
    """What a step of a network does on a GPU, counted on fake tensors: launches, and bytes in and out of each.

    `moved` has the bytes of matrix "products", of "attention" or the scan, and of all else, "elementwise"; an expanded
    tensor counts once. `saved` are bytes that autograd keeps. Of Triton's kernels, `kernels` in number, none runs.
    `F.rms_norm` counts as the kernels that it is on a GPU.
    """

    def __init__(self, network: nn.Module):
        super().__init__()
        self.moved, self.saved, self.kernels = Counter(), 0, 0
        # by storage; held, so that no other storage gets its address
        self.known = {weight.untyped_storage()._cdata: weight for weight in network.parameters()}

    def launch(self, kind: str, *arguments: object) -> None:
        """Count a kernel that reads and writes the tensors among the arguments."""
        self.number += 1
        for part in arguments:
            if isinstance(part, torch.Tensor):
                self.moved[kind] += min(part.numel() * part.element_size(), part.untyped_storage().nbytes())

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        results = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        if name not in VIEWS:
            kind = "products" if name in ("mm", "bmm", "addmm", "baddbmm") else "elementwise"
            self.launch("attention" if "attention" in name else kind, *tree_leaves((args, kwargs, results)))
        return results

    def __enter__(self):
        from triton.runtime.jit import KernelInterface

        self.patches = ExitStack()
        self.patches.enter_context(saved_tensors_hooks(self._save, lambda tensor: tensor))
        in_place_of_triton = patch.object(KernelInterface, "__getitem__", lambda kernel, grid: self._counted(kernel))
        self.patches.enter_context(in_place_of_triton)
        norm = patch.object(functional, "rms_norm", lambda x, shape, weight, eps: _Norm.apply(self, x, weight))
        self.patches.enter_context(norm)
        return super().__enter__()

    def __exit__(self, *error):
        self.patches.close()
        return super().__exit__(*error)

    def _save(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self.known:
            self.known[storage._cdata] = tensor
            self.saved += storage.nbytes()
        return tensor

    def _counted(self, kernel) -> Callable:
        """In place of a kernel; flash-linear-attention's sequence operations are in `fla.ops`."""
        while hasattr(kernel, "fn"):
            kernel = kernel.fn
        self.kernels += 1
        kind = "attention" if kernel.__module__.startswith("fla.ops.") else "elementwise"
        return lambda *args, **kwargs: self.launch(kind, *args, *kwargs.values())


class _Norm(torch.autograd.Function):
    """One kernel forward, two backward: gradients of the input and of the weight."""

    @staticmethod
    def forward(ctx, traffic, x, weight):
        ctx.traffic, result = traffic, torch.empty_like(x)
        ctx.save_for_backward(x, weight)
        traffic.launch("elementwise", x, weight, result)
        return result

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        results = torch.empty_like(x), torch.empty_like(weight)
        for result in results:
            ctx.traffic.launch("elementwise", x, weight, gradient, result)
        return None, *results
