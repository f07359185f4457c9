"""Time of HOPE relative to peers with as many parameters: a training step, a generated token, the operators called.

    python benchmarks/step.py [--models hope llama gated_deltanet mamba2] [--lengths 512 2048 4096] [--threads 1]
    python benchmarks/step.py --decode     milliseconds per generated token, HOPE's tiny preset and Llama
    python benchmarks/step.py --calls      operators that one more layer calls, HOPE and Llama

All times are CPU time of the process, of models in turn, medians over rounds: other programs disturb them least.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.quality_models import HOPE, LLAMA, MODELS, SIZES, Size, build, count_parameters
from hope_hf import HopeConfig
from hope_hf.step.objective import can_skip_logits, summed_loss

WIDTH, LAYERS = 256, 4
DEFAULT_MODELS = (HOPE, LLAMA, "gated_deltanet", "mamba2")
CALLS_LENGTH = 2048
# Operators that only look at a tensor in another way, or reserve its memory.
VIEWS = frozenset(
    "view _unsafe_view expand slice select transpose permute unsqueeze squeeze t alias detach as_strided split "
    "split_with_sizes unbind diagonal unfold empty empty_like empty_strided new_empty new_empty_strided "
    "_local_scalar_dense device promote_types".split()
)


def default_size(vocab_size: int, layers: int = LAYERS) -> Size:
    """HOPE as its config makes it from width and depth; the peers of benchmarks/quality.py are fitted to it."""
    fields = {"vocab_size": vocab_size, "hidden_size": WIDTH, "num_hidden_layers": layers, "tie_word_embeddings": True}
    config = HopeConfig(**fields)
    return replace(
        SIZES["medium"],
        vocab_size=vocab_size,
        hidden_size=WIDTH,
        num_hidden_layers=layers,
        memory_heads=config.num_memory_heads,
        level_intermediate_size=config.level_intermediate_sizes[0],
        parameters=count_parameters("hope", fields),
        mamba_layers=2 * layers,
    )


def step_seconds(network: torch.nn.Module, input_ids: torch.Tensor) -> float:
    """CPU seconds of forward and backward as the trainer makes them, all threads together."""
    start = time.process_time()
    loss = summed_loss(network, {"input_ids": input_ids, "use_cache": False}, input_ids, can_skip_logits(network))
    (loss / input_ids.numel()).backward()
    network.zero_grad()
    return time.process_time() - start


def in_turn(measures: dict, rounds: int) -> dict[str, list[float]]:
    """What each function of `measures` returns, in `rounds` rounds after one to warm up."""
    values = {name: [] for name in measures}
    for _ in range(rounds + 1):
        for name, measure in measures.items():
            values[name].append(measure())
    return {name: found[1:] for name, found in values.items()}


def rows(values: dict[str, list[float]], factor: float = 1.0) -> Iterator[list[str]]:
    """Of each model: name, median, median and range of HOPE's value over the model's in the same round."""
    for name, own in values.items():
        ratios = [hope / peer for hope, peer in zip(values[HOPE], own, strict=True)]
        ratio = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        yield [name, f"{factor * statistics.median(own):.3f}", "" if name == HOPE else ratio]


def steps(options: argparse.Namespace) -> None:
    """Print CPU seconds of a training step."""
    size = default_size(options.vocab_size)
    networks = {}
    for name in dict.fromkeys((HOPE, *options.models)):
        model = build(name, size)
        networks[name] = model.new()
        print(f"{name}: {model.parameters:,} parameters")
    print("\n| tokens | model | CPU seconds | HOPE / model |\n|---|---|---|---|")
    for length in options.lengths:
        input_ids = torch.randint(options.vocab_size, (options.batch_size, length))
        measures = {name: partial(step_seconds, network, input_ids) for name, network in networks.items()}
        for row in rows(in_turn(measures, options.rounds)):
            print(f"| {length:,} | {' | '.join(row)} |", flush=True)


class CountingCache(DynamicCache):
    """For models without softmax attention, in whose layers transformers' cache counts the tokens, or raises."""

    read = 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.read

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.read + query_length, 0


class Decoder:
    """Greedy decoding of one row, a token at a call."""

    def __init__(self, network: torch.nn.Module, context: torch.Tensor):
        self.network, self.token, self.cache = network, context, None
        # Mamba has a name of its own for it.
        self.name = "cache_params" if network.config.model_type == "mamba2" else "past_key_values"
        if set(getattr(network.config, "layer_types", ())) == {"linear_attention"} and self.name == "past_key_values":
            self.cache = CountingCache(config=network.config)
        self.prefill_seconds = self()

    @torch.no_grad()
    def __call__(self) -> float:
        """CPU seconds of one more token; the first call reads the context."""
        start = time.process_time()
        outputs = self.network(self.token, **{self.name: self.cache}, use_cache=True, logits_to_keep=1)
        if isinstance(self.cache, CountingCache):
            self.cache.read += self.token.shape[1]
        self.token, self.cache = outputs.logits[:, -1:].argmax(-1), outputs[self.name]
        return time.process_time() - start


def tiny_and_llama() -> dict[str, torch.nn.Module]:
    """HOPE's tiny preset, and a Llama of its width, depth and parameters (up to 4 units of an MLP)."""
    hope = HopeConfig.from_preset("tiny")
    shared = {name: getattr(hope, name) for name in ("vocab_size", "hidden_size", "num_hidden_layers")}

    def llama(intermediate_size: int) -> LlamaConfig:
        heads = hope.hidden_size // hope.head_dim
        return LlamaConfig(**shared, num_attention_heads=heads, intermediate_size=intermediate_size)

    def parameters(config) -> int:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config).num_parameters()

    missing = (parameters(hope) - parameters(llama(8))) / (3 * hope.hidden_size * hope.num_hidden_layers)
    configs = {HOPE: hope, LLAMA: llama(8 + 8 * round(missing / 8))}
    return {name: AutoModelForCausalLM.from_config(config).eval() for name, config in configs.items()}


def decode(options: argparse.Namespace) -> None:
    """Print milliseconds of CPU time per generated token."""
    networks = tiny_and_llama()
    for name, network in networks.items():
        print(f"{name}: {network.num_parameters():,} parameters")
    print("\n| context | model | ms per token | HOPE / model |\n|---|---|---|---|")
    for length in options.contexts:
        context = torch.randint(networks[HOPE].config.vocab_size, (1, length))
        decoders = {name: Decoder(network, context) for name, network in networks.items()}
        for row in rows(in_turn(decoders, options.tokens), factor=1e3):
            print(f"| {length:,} | {' | '.join(row)} |", flush=True)


class Calls(TorchDispatchMode):
    """Counts the operators that run inside, but for views."""

    def __init__(self):
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.number += function.overloadpacket.__name__ not in VIEWS
        return function(*args, **(kwargs or {}))


def operator_calls(network: torch.nn.Module, input_ids: torch.Tensor) -> tuple[int, int]:
    """Operators of forward and of backward, without the head."""
    with Calls() as forward:
        hidden_states = network.base_model(input_ids=input_ids, use_cache=False).last_hidden_state
    with Calls() as backward:
        hidden_states.sum().backward()
    return forward.number, backward.number


def calls(options: argparse.Namespace) -> None:
    """Print how many operators one layer more calls."""
    print(f"{CALLS_LENGTH:,} tokens\n\n| model | forward | backward |\n|---|---|---|")
    input_ids = torch.randint(options.vocab_size, (1, CALLS_LENGTH))
    for name in (HOPE, LLAMA):
        networks = (build(name, default_size(options.vocab_size, layers)).new() for layers in (1, 2))
        one, two = (operator_calls(network, input_ids) for network in networks)
        print(f"| {name} | {two[0] - one[0]} | {two[1] - one[1]} |", flush=True)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=DEFAULT_MODELS, choices=MODELS, help="HOPE is always measured")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048, 4096], help="tokens of a sequence")
    parser.add_argument("--rounds", type=int, default=5, help="rounds after one to warm up")
    parser.add_argument("--batch_size", type=int, default=2)
    parser.add_argument("--vocab_size", type=int, default=8192)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--decode", action="store_true")
    parser.add_argument("--contexts", type=int, nargs="+", default=[512, 4096], help="of --decode: tokens read before")
    parser.add_argument("--tokens", type=int, default=50, help="of --decode: tokens generated")
    parser.add_argument("--calls", action="store_true")
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    torch.set_flush_denormal(True)
    torch.manual_seed(0)
    (decode if options.decode else calls if options.calls else steps)(options)


if __name__ == "__main__":
    main()
