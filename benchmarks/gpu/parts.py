"""Parts of the measurements on a GPU: `python benchmarks/gpu/parts.py FOLDER 'PART WORD ...' ...`; run.py names all.

| part | words | what its rows hold |
|---|---|---|
| machine | | versions, the card, and its ceilings: a matrix product and a copy |
| kernels | fla, dtype, widths of heads | errors of logits and gradients, beside those of torch's operators |
| scan | | milliseconds of the delta rule's kernels and of torch's attention alone |
| step | preset, model | `speed.py peers`: training step, tokens per second, peak memory, by length |
| recomputed | preset, model | the same for the longest text, each block recomputed |
| packed | preset, model | training step of one document per row, and of several |
| decode | preset, model | reading a text and a token after it, with a growing and with a static cache |
| graph | preset, model | a token as one CUDA graph |
| profile | preset, model | the kernels that take the most of a training step |
| train | preset | `run_clm.py` under accelerate's launcher in bf16: loss, tokens per second, MFU and peak by step |

Every row is appended to FOLDER/gpu.jsonl as soon as it is measured: `{"part", "device", "preset", "model", "tokens",
"measure", "values"}`, or `"note"` instead of values where something failed. On a machine without a GPU the parts
rehearse: with a tiny model, short texts and CPU seconds.
"""

import argparse
import gc
import importlib.metadata
import itertools
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import nn
from transformers import StaticCache

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import speed
from benchmarks.gpu.run import MARK
from benchmarks.measuring import Decoder, append_row, first_line, halved, in_turn, seconds, train_step
from hope_hf import HopeConfig, HopeForCausalLM
from hope_hf.common.recompute import recompute_activations
from hope_hf.common.recompute_flag import parse_recomputed
from hope_hf.common.results import provenance

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
ROUNDS = 3 if CUDA else 1
NEW_TOKENS = 32 if CUDA else 3
TRAINED_STEPS = 50 if CUDA else 2
GPU_LENGTHS, GPU_CONTEXTS = (2048, 8192, 32768), (512, 8192)
# Of a step: what fits 80 GB. `mid` keeps 134 GiB of activations for 32,768 tokens.
GPU_TOKENS = {"pilot": 32768, "mid": 8192, "mid-hybrid": 8192}
LENGTHS, CONTEXTS, TOKENS_PER_STEP = (GPU_LENGTHS, GPU_CONTEXTS, GPU_TOKENS) if CUDA else ((64, 128), (16, 32), {})
REHEARSED = {"pilot": "tiny", "mid": "tiny", "mid-hybrid": "tiny-hybrid"}
OF_STEP = ("step", "speed", "mfu", "peak") if CUDA else ("step",)
# A kernel is wrong where its error is larger than this and than three times that of torch's operators.
ALLOWED = {"float32": 1e-4, "bfloat16": 3e-2}
NEEDS_CUDA = "needs CUDA"
LOGITS = "logits"


class Rows:
    """Appends the rows of a part to a file of JSON lines."""

    def __init__(self, file: Path, part: str):
        self.file, self.part = file, part
        # asked for once: after some errors the driver answers no more
        self.device = torch.cuda.get_device_name() if CUDA else "CPU"

    def write(self, **columns) -> None:
        row = {"part": self.part, "device": self.device, **columns}
        append_row(self.file, row, sys.stdout)

    def note(self, note: str, **columns) -> None:
        self.write(**columns, measure="note", note=note)

    def attempt(self, run: Callable[[], object], **columns):
        """What `run()` returns; a note of its error and None if it fails."""
        try:
            return run()
        # Compilers of kernels, drivers and allocators have errors of their own kinds.
        except Exception as error:
            # a graph that is cut off hides the error that did it
            before = f" (after {first_line(error.__context__)})" if error.__context__ else ""
            self.note(first_line(error) + before, **columns)


def milliseconds(run: Callable[[], object]) -> list[float]:
    """Milliseconds of a call, median first; on a GPU by its own clock, with the cache of the chip emptied before."""
    if not CUDA:
        return [1e3 * seconds(run)]
    from triton.testing import do_bench

    return do_bench(run, warmup=50, rep=200, quantiles=[0.5, 0.2, 0.8])


def case_of(
    preset: str, *words: object, kind: type[speed.Peers] = speed.Peers
) -> tuple[argparse.Namespace, speed.Peers]:
    """Options and models of `speed.py peers`."""
    words = ["peers", "--device", DEVICE, "--rounds", ROUNDS, "--new_tokens", NEW_TOKENS, *words]
    words += ["--tokens_per_step", TOKENS_PER_STEP.get(preset, max(LENGTHS))]
    options = speed.make_parser().parse_args(list(map(str, words)))
    return options, kind(options, preset)


def machine(rows: Rows) -> None:
    packages = {}
    for name in ("triton", "fla-core", "flash-attn", "causal-conv1d", "tilelang"):
        try:
            packages[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            packages[name] = None
    found = provenance()
    found["versions"] |= packages | {"cuda": torch.version.cuda}
    if CUDA:
        query = ["nvidia-smi", "--query-gpu=driver_version,clocks.max.sm,power.limit", "--format=csv,noheader"]
        found["driver"] = rows.attempt(partial(subprocess.check_output, query, text=True))
        found["gib"] = round(torch.cuda.get_device_properties(0).total_memory / 2**30, 1)
    rows.write(measure="machine", **found)
    side, elements = (8192, 2**30) if CUDA else (256, 2**20)
    left, right = torch.randn(2, side, side, device=DEVICE, dtype=torch.bfloat16)
    rates = [2 * side**3 / took / 1e9 for took in milliseconds(lambda: left @ right)]
    rows.write(model="bf16 matrix product", tokens=side, measure="TFLOP/s", values=rates)
    source = torch.randn(elements, device=DEVICE, dtype=torch.bfloat16)
    target = torch.empty_like(source)
    rates = [4 * elements / took / 1e6 for took in milliseconds(lambda: target.copy_(source))]
    rows.write(model="copy, read and written", tokens=elements, measure="GB/s", values=rates)


def kernels(rows: Rows, kernel: str, dtype: str, *widths: str) -> None:
    # Triton's products of float32 are in tf32 otherwise.
    products = {"TRITON_F32_DEFAULT": "ieee"} if dtype == "float32" else {}
    for width, text in itertools.product(map(int, widths), TEXTS):
        about = {"model": kernel, "dtype": dtype, "width": width, "text": text}
        with patch.dict(os.environ, products):
            found = rows.attempt(partial(compare, **about), **about)
        if found:
            rows.write(**about, measure="error", **found)


def texts(rows: int, length: int) -> dict[str, dict[str, torch.Tensor]]:
    """The model's further inputs by kind of text."""
    cut = length // 3
    documents = torch.cat([torch.arange(cut), torch.arange(length - cut)]).expand(rows, -1)
    padding = (torch.arange(length) >= torch.arange(rows)[:, None] * 9).long()
    return {"plain": {}, "documents": {"position_ids": documents}, "padding": {"attention_mask": padding}}


TEXTS = tuple(texts(1, 3))


def compare(model: str, dtype: str, width: int, text: str) -> dict:
    """Errors of a small model under a kernel, and under torch's operators in the same dtype, against float64.

    Errors are relative to each tensor's norm: of the logits, and of the gradient that is worst beside torch's.
    """
    torch.manual_seed(0)
    shape = {"vocab_size": 64, "hidden_size": 256, "num_hidden_layers": 2, "level_intermediate_sizes": [128]}
    config = HopeConfig(**shape, head_dim=width)
    exact = HopeForCausalLM(config).double()
    with torch.no_grad():
        for parameter in exact.parameters():
            # far from the initial values, some of which are zero
            parameter += 0.03 * torch.randn_like(parameter)
    length = 200
    ids = torch.randint(64, (2, length), device=DEVICE)
    inputs = {name: part.to(DEVICE) for name, part in texts(2, length)[text].items()}
    weights = torch.randn(2, length, 64, device=DEVICE)
    if text == "padding":
        weights *= inputs["attention_mask"][..., None]

    def results(asked: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        with patch.dict(os.environ, HOPE_KERNELS=asked):
            network = HopeForCausalLM(config).to(DEVICE, dtype)
            network.load_state_dict(exact.state_dict())
            logits = network(ids, **inputs).logits
            (logits * weights.to(dtype)).sum().backward()
        made = {name: parameter.grad for name, parameter in network.named_parameters()}
        return {name: part.double() for name, part in (made | {LOGITS: logits.detach() * (weights != 0)}).items()}

    # in this order, since a kernel that cannot run says so at once
    found = [results(asked, getattr(torch, dtype)) for asked in (model, "torch")]
    truth = results("plain", torch.float64)
    own, twin = (
        {name: float((ours[name] - part).norm() / part.norm().clamp(min=1e-9)) for name, part in truth.items()}
        for ours in found
    )
    excess = {name: error / max(ALLOWED[dtype], 3 * twin[name]) for name, error in own.items()}
    # a NaN is worse than any number
    worst = max(excess, key=lambda name: (math.isnan(excess[name]), excess[name]))
    return {
        "values": [own[LOGITS], own[worst]], "torch": [twin[LOGITS], twin[worst]], "worst": worst,
        "wrong": sorted(name for name in excess if not excess[name] <= 1),
    }  # fmt: skip


def scan(rows: Rows) -> None:
    heads = HopeConfig.from_preset("mid").num_memory_heads
    for length in LENGTHS:
        shape = (1, length, heads, 64)
        streams = [F.normalize(part, dim=-1) for part in torch.randn(3, *shape, device=DEVICE, dtype=torch.bfloat16)]
        narrow = [stream[:, :, :16].transpose(1, 2).contiguous() for stream in streams]
        gates = [-0.1 * torch.rand(shape[:3], device=DEVICE), torch.rand(shape[:3], device=DEVICE).bfloat16()]
        calls = {
            f"delta rule, {heads} heads": (partial(delta_rule, gates=gates), streams),
            "attention, 16 heads": (attention, narrow),
        }
        for (name, (forward, inputs)), backward in itertools.product(calls.items(), (False, True)):
            run = partial(forward_and_backward, forward, inputs) if backward else partial(forward, inputs)
            if found := rows.attempt(partial(milliseconds, run), model=name, tokens=length):
                measure = f"forward{' and backward' if backward else ''}, ms"
                rows.write(model=name, tokens=length, measure=measure, values=found)


def delta_rule(streams: list[torch.Tensor], gates: list[torch.Tensor]) -> torch.Tensor:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    return chunk_gated_delta_rule(*streams, *gates)[0]


def attention(streams: list[torch.Tensor]) -> torch.Tensor:
    return F.scaled_dot_product_attention(*streams, is_causal=True)


def forward_and_backward(forward: Callable[[list[torch.Tensor]], torch.Tensor], inputs: list[torch.Tensor]) -> None:
    leaves = [part.detach().requires_grad_() for part in inputs]
    result = forward(leaves)
    torch.autograd.grad(result, leaves, result.detach())


def step(rows: Rows, preset: str, model: str) -> None:
    lengths = [length for length in LENGTHS if length <= TOKENS_PER_STEP.get(preset, length)]
    peers(rows, preset, model, "--measures", *OF_STEP, "--lengths", *lengths, "--contexts")


def recomputed(rows: Rows, preset: str, model: str) -> None:
    words = ["--measures", *OF_STEP, "--lengths", LENGTHS[-1], "--contexts"]
    peers(rows, preset, model, *words, kind=Recomputing)


class Recomputing(speed.Peers):
    """The same models, each of whose blocks is recomputed in the backward pass."""

    def new(self, *names) -> nn.Module:
        network = super().new(*names)
        recompute_activations(network, parse_recomputed("block"))
        return network


def peers(rows: Rows, preset: str, model: str, *words: object, kind: type[speed.Peers] = speed.Peers) -> None:
    options, case = case_of(preset, "--models", model, *words, kind=kind)
    speed.measure(options, case, preset, rows.file, part=rows.part)


def timed_step(network: nn.Module, ids: torch.Tensor, **inputs: torch.Tensor) -> list[float]:
    """Seconds of training steps after one to warm up."""
    return in_turn({"": partial(seconds, partial(train_step, network, ids, **inputs), DEVICE)}, ROUNDS)[""]


def packed(rows: Rows, preset: str, model: str) -> None:
    _, case = case_of(preset)
    network = case.new(model)
    for length in LENGTHS[:2]:
        ids = case.inputs(length)
        ids = halved(partial(train_step, network), ids)
        # documents of 300 to 1,100 tokens, about 700
        shortest = 300 if CUDA else 10
        for documents in (False, True):
            inputs = {"position_ids": starts(*ids.shape, shortest)} if documents else {}
            about = {"preset": preset, "model": model, "tokens": length, "documents": documents}
            if found := rows.attempt(partial(timed_step, network, ids, **inputs), **about):
                rows.write(**about, measure="step", values=found)


def starts(rows: int, length: int, shortest: int) -> torch.Tensor:
    """Positions [rows, length] of documents of random lengths, each from 0."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for _ in range(rows):
        lengths = torch.randint(shortest, 4 * shortest, (length // shortest + 1,), generator=generator)
        made.append(torch.cat([torch.arange(int(part)) for part in lengths])[:length])
    return torch.stack(made).to(DEVICE)


def decode(rows: Rows, preset: str, model: str) -> None:
    options, case = case_of(preset, "--models", model, "--lengths")
    options.contexts, options.measures = CONTEXTS, ["prefill", "token", "cache"]
    speed.measure(options, case, preset, rows.file, part=rows.part)
    decode_with(rows, preset, model, "static cache", StaticDecoder)


def graph(rows: Rows, preset: str, model: str) -> None:
    if CUDA:
        decode_with(rows, preset, model, "CUDA graph", GraphDecoder)
    else:
        rows.note(NEEDS_CUDA, preset=preset, model=model)


def decode_with(rows: Rows, preset: str, model: str, name: str, kind: type[Decoder]) -> None:
    """Milliseconds of a token, and how many tokens are those of a growing cache."""
    _, case = case_of(preset)
    network = case.new(model).eval()
    for context in CONTEXTS:
        text = case.inputs(context, rows=1)
        about = {"preset": preset, "tokens": context, "model": f"{model}, {name}"}
        expected = rows.attempt(lambda text=text: generated(Decoder(network, text)), **about)
        decoder = rows.attempt(partial(kind, network, text), **about)
        made = decoder and rows.attempt(partial(generated, decoder), **about)
        if made:
            equal = sum(a == b for a, b in zip(made, expected or [], strict=False))
            found = [1e3 * seconds(decoder, DEVICE) for _ in range(NEW_TOKENS)]
            rows.write(**about, measure="token", values=found, equal=f"{equal} of {len(made)} tokens")


def generated(decoder: Decoder) -> list[int]:
    """The next tokens."""
    made = []
    for _ in range(NEW_TOKENS):
        decoder()
        made.append(int(decoder.token[0, -1]))
    return made


class StaticDecoder(Decoder):
    """A decoder whose cache keeps its place."""

    def __init__(self, network: nn.Module, context: torch.Tensor):
        room = context.shape[1] + 3 * NEW_TOKENS
        super().__init__(network, context, StaticCache(network.config, max_cache_len=room))


class GraphDecoder(StaticDecoder):
    """The same; from the fifth call on, a token is one replay of a CUDA graph."""

    graph, calls = None, 0

    def __call__(self) -> None:
        self.calls += 1
        if self.graph is not None:
            self.graph.replay()
        elif self.calls < 4:
            super().__call__()
        else:
            self._record()

    def _record(self) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            super().__call__()
        torch.cuda.current_stream().wait_stream(stream)
        # the graph reads its last token where it wrote it
        token, graph = self.token.clone(), torch.cuda.CUDAGraph()
        self.token = token
        with torch.cuda.graph(graph):
            super().__call__()
            token.copy_(self.token)
        self.token, self.graph = token, graph


def profile(rows: Rows, preset: str, model: str) -> None:
    _, case = case_of(preset)
    network = case.new(model)
    ids = halved(partial(train_step, network), case.inputs(LENGTHS[0]))
    activities = [torch.profiler.ProfilerActivity.CPU] + [torch.profiler.ProfilerActivity.CUDA] * CUDA
    with torch.profiler.profile(activities=activities) as profiler:
        wall = seconds(partial(train_step, network, ids), DEVICE)
    about = {"preset": preset, "model": model, "tokens": ids.numel()}
    # on a GPU operators have the time of their kernels, too, which are counted by themselves
    kind = torch.autograd.DeviceType.CUDA if CUDA else torch.autograd.DeviceType.CPU
    found = [event for event in profiler.key_averages() if event.device_type == kind]
    took = {event.key: event.self_device_time_total if CUDA else event.self_cpu_time_total for event in found}
    total, calls = sum(took.values()), {event.key: event.count for event in found}
    rows.write(**about, measure="launches", values=[sum(calls.values())])
    rows.write(**about, measure="busy, %", values=[100 * total / 1e6 / wall])
    for name in sorted(took, key=took.get, reverse=True)[:20]:
        share = round(100 * took[name] / total, 2)
        rows.write(**about, measure="share, %", kernel=name[:100], calls=calls[name], values=[share])


def train(rows: Rows, preset: str) -> None:
    folder = rows.file.parent / "train"
    steps, length = TRAINED_STEPS, LENGTHS[0]
    rows_per_step = TOKENS_PER_STEP.get(preset, 2 * length) // length
    launch_file = f"accelerate_configs/{'single_bf16' if CUDA else 'single'}.yaml"
    flags = f"run_clm.py --config_name {preset} --output_dir {folder} --block_size {length} --max_train_steps {steps}"
    flags += f" --per_device_train_batch_size {rows_per_step} --logging_steps 10 --eval_steps {steps}"
    flags += " --checkpointing_steps 0 --num_warmup_steps 20 --learning_rate 1e-3 --optimizer muon"
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", launch_file, *flags.split()]
    subprocess.run(command, check=True, cwd=Path(__file__).parents[2], stdin=subprocess.DEVNULL)
    for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        found = json.loads(line)
        about = {"preset": preset, "model": "hope", "tokens": found["tokens"]}
        for measure in ("train/loss", "train/tokens_per_second", "train/mfu_percent", "train/peak_memory_gib"):
            if found.get(measure) is not None:
                rows.write(**about, measure=measure, values=[found[measure]])


PARTS = {
    part.__name__: part
    for part in (machine, kernels, scan, step, recomputed, packed, decode, graph, profile, train)
}  # fmt: skip


def search_shortly() -> None:
    """Let Triton time a configuration for 20 ms instead of 125: its searches took most of a minute."""
    from triton.runtime import driver
    from triton.testing import do_bench

    driver.active.get_benchmarker = lambda: partial(do_bench, warmup=4, rep=16)


def main(argv: list[str]) -> None:
    folder, *order = argv
    if CUDA:
        search_shortly()
    else:
        torch.set_num_threads(1)
    for asked in order:
        print(f"{MARK}{asked}", flush=True)
        part, *words = asked.split()
        if not CUDA:
            words = [REHEARSED.get(word, word) for word in words]
        torch.manual_seed(0)
        rows = Rows(Path(folder, "gpu.jsonl"), part)
        columns = dict(zip(("preset", "model"), words, strict=False)) if part != "kernels" else {}
        rows.attempt(partial(PARTS[part], rows, *words), **columns)
        gc.collect()
        if CUDA:
            # after some errors this process can compute no more: it ends here, and run.py starts another
            torch.rand(1, device=DEVICE).item()
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main(sys.argv[1:])
