"""Time and memory of HOPE beside peers of its size. Models take turns, so that other programs disturb all alike.

    python benchmarks/speed.py peers                          everything, by length, on one CPU thread
    python benchmarks/speed.py peers --measures step token --models hope llama --lengths 512 2048 --contexts 512
    python benchmarks/speed.py peers --device cuda --presets pilot mid   one GPU, bfloat16 (all: benchmarks/gpu/run.py)
    python benchmarks/speed.py peers --presets medium --measures token     quality.py's models, with three levels
    python benchmarks/speed.py peers --report                 the table and the picture of what was measured
    python benchmarks/speed.py mixers                         sparse attention beside torch's attention (sdpa)
    python benchmarks/speed.py recompute                      a training step by --gradient_checkpointing
    python benchmarks/speed.py prompt                         peak memory of generate by the length of the prompt
    python benchmarks/speed.py calls                          operators that one more layer calls, HOPE and Llama
    python benchmarks/speed.py bytes                          launches and bytes of a GPU's training step, without one

`peers` and `mixers` append a row to DIR/speed.jsonl as soon as it is measured: `{"device", "preset", "model",
"tokens", "measure", "values"}`, or `"note"` instead of values where a model did not run. The measures:

| measure | what |
|---|---|
| step | seconds of forward and backward, as the trainer makes them |
| speed, mfu | on a GPU: tokens per second of that step, and its share of the GPU's peak FLOP/s |
| prefill | seconds of reading a text into a cache, without gradients |
| token | milliseconds of a token generated after it |
| cache | MiB that the model has to carry after it |
| peak | MiB that a training step needs beside the model; on a CPU in a process of its own |

Seconds are CPU seconds of all threads of the process, on a GPU wall-clock seconds. A row holds one value per round.
Peers have HOPE's width, depth, vocabulary and parameters (`quality/models.py`). On a CPU they run transformers' torch
code; on a GPU they take the kernels that are installed. `hope_fla` and `hope_torch` are HOPE under that
HOPE_KERNELS.
"""

import argparse
import gc
import importlib.util
import json
import os
import resource
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM, LlamaConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.measuring import (
    Calls,
    Decoder,
    Traffic,
    append_row,
    first_line,
    halved,
    held_bytes,
    in_turn,
    peak_growth,
    read,
    seconds,
    train_step,
)
from benchmarks.quality.models import HOPE, LLAMA, LLAMA_CONV, RECURRENT_PEERS, SIZES, build
from benchmarks.speed_report import MEASURES, report
from hope_hf import PRESETS, HopeConfig, HopeForCausalLM, HopeModel
from hope_hf.common.flops import flops_per_token
from hope_hf.common.gpus import peak_flops
from hope_hf.common.recompute import recompute_activations
from hope_hf.common.recompute_flag import parse_recomputed
from hope_hf.model.calls import plan_tokens
from hope_hf.model.documents import Documents
from hope_hf.plan.launch import STRATEGIES, Launch, StepOptions
from hope_hf.plan.simulate import simulate

MIB = 2**20
WIDTH, LAYERS = 256, 4
KERNELS = {"hope_fla": {"HOPE_KERNELS": "fla"}, "hope_torch": {"HOPE_KERNELS": "torch"}}
# transformers' Mamba-2 without kernels builds a tensor of 256 x heads x state numbers per token.
MOST_TOKENS = {("mamba2", "cpu"): 8192}
# The scan of Gated DeltaNet-2 is our own here, for its losses: its time says nothing about its authors' kernels.
TIMED_PEERS = tuple(name for name in RECURRENT_PEERS if name != "gated_deltanet_2")
SPARSE, SDPA = "sparse_attention", "full_attention"


def apart(*words: object) -> dict:
    """The JSON object that this program prints last when it runs with these arguments in its own process."""
    command = [sys.executable, str(Path(__file__).resolve()), *map(str, words), "--here"]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])


class Peers:
    """Whole models of equal parameters: a size of quality/models.py, or HOPE as a preset or of default width."""

    def __init__(self, options: argparse.Namespace, preset: str | None):
        self.options, self.device = options, options.device
        if preset in SIZES:
            self.size = SIZES[preset]
            with torch.device("meta"):
                self.config = build(HOPE, self.size).new().config
            return
        tied = {"tie_word_embeddings": True}
        fields = {"vocab_size": options.vocab_size, "hidden_size": WIDTH, "num_hidden_layers": LAYERS} | tied
        self.config = HopeConfig.from_preset(preset, **tied) if preset else HopeConfig(**fields)
        with torch.device("meta"):
            parameters = HopeForCausalLM(self.config).num_parameters()
        self.size = replace(
            SIZES["medium"],
            **{name: getattr(self.config, name) for name in ("vocab_size", "hidden_size", "num_hidden_layers")},
            mamba_layers=2 * self.config.num_hidden_layers,
            parameters=parameters,
        )

    def new(self, name: str, dtype: torch.dtype | None = None) -> nn.Module:
        """The model with random weights on the device, by default in float32 on a CPU and in bfloat16 on a GPU."""
        dtype = dtype or (torch.float32 if self.device == "cpu" else torch.bfloat16)
        with patch.dict(os.environ, KERNELS.get(name, {})), torch.device(self.device):
            if name == HOPE or name in KERNELS:
                return AutoModelForCausalLM.from_config(self.config, dtype=dtype)
            # Kimi Delta Attention cannot be as small.
            larger = 1.01 if name == "kimi_linear" else 1
            network = build(name, replace(self.size, parameters=round(larger * self.size.parameters))).new(dtype)
        if name == LLAMA and self.device == "cuda" and importlib.util.find_spec("flash_attn") is not None:
            network.set_attn_implementation("flash_attention_2")
        return network

    def inputs(self, length: int, rows: int | None = None) -> torch.Tensor:
        """Random tokens [rows, length], by default as many rows as a training step has."""
        rows = rows or max(self.options.batch_size, self.options.tokens_per_step // length)
        return torch.randint(self.config.vocab_size, (rows, length), device=self.device)

    step = staticmethod(train_step)


class Mixers:
    """One mixer of width 256, four heads of 64 that share one key head, and one text; no model around it."""

    device = "cpu"

    def new(self, name: str) -> HopeModel:
        torch.manual_seed(0)
        shape = {"vocab_size": 8, "hidden_size": WIDTH, "num_hidden_layers": 1, "num_key_value_heads": 1}
        return HopeModel(HopeConfig(**shape, layer_types=[name], level_intermediate_sizes=[8] * 3))

    def inputs(self, length: int) -> torch.Tensor:
        return torch.randn(1, length, WIDTH, requires_grad=True)

    def step(self, model: HopeModel, hidden_states: torch.Tensor) -> None:
        if "blocks" in model.config.needs:
            context = plan_tokens(model, hidden_states, Documents(None, None), None)
        else:
            angles = model.rotary_emb(hidden_states, position_ids=torch.arange(hidden_states.shape[1])[None])
            context = {"attention_mask": None, "position_embeddings": angles}
        model.layers[0].mixer(hidden_states, **context)[0].sum().backward()


def measure(options: argparse.Namespace, case: Peers | Mixers, preset: str | None, file: Path, **about) -> None:
    """Append a row for every model, length and measure to the file, each with the columns `about`, too."""
    wanted, device = set(options.measures), case.device
    where = torch.cuda.get_device_name() if device == "cuda" else "CPU"

    def write(name: str, tokens: int, measure: str, **found) -> None:
        row = about | {"device": where, "preset": preset, "model": name, "tokens": tokens, "measure": measure} | found
        append_row(file, row, sys.stderr)

    def add(name: str, measure: str, values: list[float]) -> None:
        write(name, length, measure, values=[round(value, 5) for value in values])

    def refuse(name: str, error: Exception) -> None:
        write(name, length, "note", note=first_line(error))
        networks[name].zero_grad()

    def timed(functions: dict[str, Callable], rounds: int) -> dict[str, list[float]]:
        return in_turn({name: partial(seconds, call, device) for name, call in functions.items()}, rounds, refuse)

    def fitting(name: str, inputs: torch.Tensor) -> torch.Tensor | None:
        """As many of the rows as the GPU's memory holds in a step of the model; none if a step fails."""
        try:
            rows = halved(partial(case.step, networks[name]), inputs)
        except Exception as error:
            return refuse(name, error)
        if len(rows) < len(inputs):
            write(name, length, "note", note=f"{len(rows)} of {len(inputs)} rows: more do not fit the GPU's memory")
        return rows

    networks = {name: case.new(name) for name in options.models}
    for length in sorted({*options.lengths, *options.contexts}):
        running = {n: net for n, net in networks.items() if length <= MOST_TOKENS.get((n, device), length)}
        if length != min(options.lengths, default=length):
            # torch's operators alone take seconds per step on a GPU: one length suffices
            running.pop("hope_torch", None)
        rows = dict.fromkeys(running, case.inputs(length) if length in options.lengths else None)
        if length in options.lengths and device == "cuda":
            rows = {name: found for name in running if (found := fitting(name, rows[name])) is not None}
            running = {name: running[name] for name in rows}
        if length in options.lengths and wanted & {"step", "speed", "mfu"}:
            steps = {name: partial(case.step, net, rows[name]) for name, net in running.items()}
            steps = timed(steps, options.rounds)
            running = {name: running[name] for name in steps}
            for name, values in steps.items():
                add(name, "step", values)
                if device == "cuda":
                    speeds = [rows[name].numel() / value for value in values]
                    add(name, "speed", speeds)
                    if best := peak_flops(torch.device(device), "bf16"):
                        share = 100 * flops_per_token(running[name], length) / best
                        add(name, "mfu", [share * speed for speed in speeds])
                counted = [getattr(module, "kernel_fallbacks", {}) for module in running[name].modules()]
                if reasons := sorted({reason for fallbacks in counted for _, reason in fallbacks}):
                    write(name, length, "note", note="; ".join(reasons))
        if length in options.lengths and "peak" in wanted:
            for name, network in running.items():
                try:
                    add(name, "peak", [_peak(options, case, preset, name, network, rows[name]) / MIB])
                except Exception as error:
                    refuse(name, error)
        if length in options.contexts and wanted & {"prefill", "token", "cache"}:
            text = case.inputs(length, rows=1)
            if "prefill" in wanted:
                reads = {name: partial(read, net, text) for name, net in running.items()}
                for name, values in timed(reads, options.rounds).items():
                    add(name, "prefill", values)
            decoders = {name: Decoder(network, text) for name, network in running.items()}
            # the first call reads the text
            decoders = {name: decoders[name] for name in timed(decoders, 0)}
            for name, decoder in decoders.items():
                add(name, "cache", [held_bytes(decoder.cache) / MIB])
            if "token" in wanted:
                for name, values in timed(decoders, options.new_tokens).items():
                    add(name, "token", [1e3 * value for value in values])
            del decoders
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()


def _peak(options, case: Peers | Mixers, preset: str | None, name: str, network: nn.Module, inputs) -> int:
    """Bytes that a training step on `inputs` needs beside the model."""
    if case.device == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        case.step(network, inputs)
        return torch.cuda.max_memory_allocated() - before
    words = [options.case, "--models", name, "--lengths", inputs.shape[1]]
    if isinstance(case, Peers):
        words += ["--vocab_size", options.vocab_size, "--batch_size", options.batch_size]
        words += ["--tokens_per_step", options.tokens_per_step, *(["--presets", preset] if preset else [])]
    return apart(*words)["peak"]


def print_peak(options: argparse.Namespace, case: Peers | Mixers) -> None:
    """Print the bytes by which this process grows in a step; a short step before it loads libraries and buffers."""
    network = case.new(options.models[0])
    for length in (8 if isinstance(case, Peers) else 64, *options.lengths):
        inputs = case.inputs(length)
        grown = peak_growth(partial(case.step, network, inputs))
    print(json.dumps({"peak": grown}))


def run_peers(options: argparse.Namespace) -> None:
    """HOPE and other models of its size, by length."""
    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("error: --device cuda: torch finds no GPU; --device cpu measures this processor")
    if options.contexts is None:
        options.contexts = [*options.lengths, 2 * max(options.lengths, default=0)]
    measure_and_report(options, {preset: Peers(options, preset) for preset in options.presets or [None]})


def run_mixers(options: argparse.Namespace) -> None:
    """Sparse attention beside torch's attention, the mixers alone."""
    measure_and_report(options, {None: Mixers()})


def measure_and_report(options: argparse.Namespace, cases: dict[str | None, Peers | Mixers]) -> None:
    """Measure every preset's case, write the rows, print the table and draw the picture."""
    if options.here:
        (case,) = cases.values()
        return print_peak(options, case)
    file = Path(options.output_dir, "speed.jsonl")
    if not options.report:
        file.parent.mkdir(parents=True, exist_ok=True)
        for preset, case in cases.items():
            measure(options, case, preset, file)
    elif not file.is_file():
        raise SystemExit(f"error: --report: {file} is missing: run this without --report first")
    report([json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()], file.with_suffix(".png"))


def recompute(options: argparse.Namespace) -> None:
    """Print memory and time of a training step by what is recomputed: simulated peak and CPU seconds."""
    config = HopeConfig.from_preset(options.preset)
    input_ids = torch.randint(config.vocab_size, (options.batch_size, options.tokens))
    steps = {}
    for setting in ("none", "every:4", "every:2", "mixer", "block"):
        model = HopeForCausalLM(config).train()
        recompute_activations(model, parse_recomputed(setting))
        steps[setting] = partial(seconds, partial(train_step, model, input_ids))
    found = in_turn(steps, options.rounds)
    print("| `--gradient_checkpointing` | peak, GB | CPU seconds | over none |\n|---|---|---|---|")
    for setting, own in found.items():
        step = StepOptions(options.batch_size, options.tokens, checkpointing=setting)
        peak = simulate(config, Launch(STRATEGIES["ddp"], 1, 1, on_cpu=True), step).peak
        ratios = [value / none for value, none in zip(own, found["none"], strict=True)]
        ratio = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        print(f"| {setting} | {peak / 1e9:.3f} | {statistics.median(own):.2f} | {ratio} |", flush=True)


def prompt(options: argparse.Namespace) -> None:
    """Print the peak memory of a process that reads a prompt in chunks and generates 8 tokens, by length."""
    if options.here:
        model = HopeForCausalLM(HopeConfig.from_preset(options.preset)).eval()
        ids = torch.randint(model.config.vocab_size, (1, options.lengths[0]))
        writes = partial(model.generate, ids, max_new_tokens=8, min_new_tokens=8, do_sample=False, pad_token_id=0)
        took = seconds(partial(writes, prefill_chunk_size=options.prefill_chunk_size))
        print(json.dumps({"seconds": took, "mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}))
        return
    rows = {length: prompt_apart(length, options.prefill_chunk_size, options.preset) for length in options.lengths}
    print("| prompt, tokens | CPU seconds | peak, MiB |\n|---|---|---|")
    for length, row in sorted(rows.items()):
        print(f"| {length:,} | {row['seconds']:.1f} | {row['mib']:,.0f} |")
    print(f"\nlongest over shortest: {rows[max(rows)]['mib'] / rows[min(rows)]['mib']:.3f}")


def prompt_apart(length: int, prefill_chunk_size: int, preset: str = "tiny") -> dict:
    """`{"seconds", "mib"}` of one prompt, measured in its own process."""
    return apart("prompt", "--lengths", length, "--prefill_chunk_size", prefill_chunk_size, "--preset", preset)


def calls(options: argparse.Namespace) -> None:
    """Print how many operators one more layer calls, without the head."""

    def of_network(network: nn.Module) -> tuple[int, int]:
        with Calls() as forward:
            hidden_states = network.base_model(input_ids=input_ids, use_cache=False).last_hidden_state
        with Calls() as backward:
            hidden_states.sum().backward()
        return forward.number, backward.number

    input_ids = torch.randint(1024, (1, options.tokens))
    shape = {"vocab_size": 1024, "hidden_size": WIDTH}
    llama = {"num_attention_heads": 4, "intermediate_size": 4 * WIDTH}
    print(f"{options.tokens:,} tokens\n\n| model | forward | backward |\n|---|---|---|")
    for name, kind, own in ((HOPE, HopeConfig, {}), (LLAMA, LlamaConfig, llama)):
        configs = (kind(**shape, **own, num_hidden_layers=layers) for layers in (1, 2))
        one, two = (of_network(AutoModelForCausalLM.from_config(config)) for config in configs)
        print(f"| {name} | {two[0] - one[0]} | {two[1] - one[1]} |", flush=True)


def count_bytes(options: argparse.Namespace) -> None:
    """Print launches and bytes of a GPU's training step, HOPE with kernels and Llama, without the head."""
    if None in (importlib.util.find_spec("fla"), importlib.util.find_spec("triton")):
        raise SystemExit("error: bytes counts flash-linear-attention's kernels: pip install fla-core triton")
    case, kinds = Peers(options, options.preset), ("elementwise", "attention", "products")
    print(f"| {options.tokens:,} tokens | launches | elementwise | attention, scan | products | saved |")
    print("|---" * 6 + "|")
    for name in (HOPE, LLAMA):
        found = traffic_of(case, name, options.tokens)
        moved = " | ".join(f"{found.moved[kind] / 1e9:.1f} GB" for kind in kinds)
        print(f"| {name} | {found.number:,} | {moved} | {found.saved / 2**30:.2f} GiB |", flush=True)


def traffic_of(case: Peers, name: str, tokens: int) -> Traffic:
    """What a training step of one text moves in bfloat16, counted on fake tensors."""
    # The tensors are on a CPU, where the kernels run in Triton's interpreter alone; here they do not run.
    with patch.dict(os.environ, {"HOPE_KERNELS": "fla", "TRITON_INTERPRET": "1"}), FakeTensorMode():
        network = case.new(name, torch.bfloat16)
        embedded = torch.zeros(1, tokens, case.config.hidden_size, dtype=torch.bfloat16)
        with Traffic(network) as traffic:
            network.base_model(inputs_embeds=embedded, use_cache=False).last_hidden_state.sum().backward()
    return traffic


def make_parser() -> argparse.ArgumentParser:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form, allow_abbrev=False)
    cases = parser.add_subparsers(dest="case", required=True, metavar="CASE")

    def case(name: str, run: Callable, lengths: list[int] | None = None, preset: bool = False):
        added = cases.add_parser(name, help=run.__doc__.splitlines()[0], allow_abbrev=False)
        added.set_defaults(run=run)
        added.add_argument("--threads", type=int, default=1, help="of the CPU")
        added.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
        if lengths:
            added.add_argument("--lengths", type=int, nargs="*", default=lengths, help="tokens of a text")
        if preset:
            added.add_argument("--preset", default="tiny", choices=list(PRESETS))
        return added

    def rows(added: argparse.ArgumentParser, models: tuple[str, ...], default: tuple[str, ...], measures: list[str]):
        added.add_argument("--output_dir", default="runs/speed", help="of speed.jsonl, to which rows are added")
        added.add_argument("--models", nargs="+", choices=models, default=list(default), help="the first is compared")
        added.add_argument("--measures", nargs="+", choices=measures, default=measures)
        added.add_argument("--rounds", type=int, default=3, help="rounds after one to warm up")
        added.add_argument("--report", action="store_true", help="measure nothing: table and picture of the rows")

    peers = case("peers", run_peers, [2**power for power in range(9, 15)])
    rows(peers, (HOPE, *KERNELS, LLAMA, LLAMA_CONV, *TIMED_PEERS), (HOPE, LLAMA, *TIMED_PEERS), [*MEASURES])
    models = "presets of HOPE, or sizes of quality/models.py; default: 256 wide, four layers"
    peers.add_argument("--presets", nargs="+", choices=[*PRESETS, *SIZES], help=models)
    peers.add_argument("--contexts", type=int, nargs="*", help="tokens read before a token (default: also twice more)")
    peers.add_argument("--new_tokens", type=int, default=30, help="tokens generated")
    peers.add_argument("--batch_size", type=int, default=1, help="texts of a training step")
    peers.add_argument("--tokens_per_step", type=int, default=0, help="instead of --batch_size, for every length")
    peers.add_argument("--vocab_size", type=int, default=8192, help="without --presets")
    peers.add_argument("--device", default="cpu", choices=["cuda", "cpu"])
    mixers = case("mixers", run_mixers, [2**power for power in range(10, 16)])
    rows(mixers, (SPARSE, SDPA), (SPARSE, SDPA), ["step", "peak"])
    mixers.set_defaults(contexts=[])
    again = case("recompute", recompute, preset=True)
    again.add_argument("--batch_size", type=int, default=1)
    again.add_argument("--tokens", type=int, default=1024)
    again.add_argument("--rounds", type=int, default=5, help="rounds after one to warm up")
    case("prompt", prompt, [2000, 100_000], preset=True).add_argument("--prefill_chunk_size", type=int, default=2048)
    case("calls", calls).add_argument("--tokens", type=int, default=2048)
    counted = case("bytes", count_bytes)
    counted.add_argument("--preset", default="mid", choices=list(PRESETS))
    counted.add_argument("--tokens", type=int, default=2048)
    counted.set_defaults(device="cpu", vocab_size=None)
    return parser


def main(argv: list[str] | None = None) -> None:
    options = make_parser().parse_args(argv)
    torch.set_num_threads(options.threads)
    torch.set_flush_denormal(True)
    torch.manual_seed(0)
    options.run(options)


if __name__ == "__main__":
    main()
