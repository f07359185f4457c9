"""Measures the memories: their gates, and how large their state becomes under unusual inputs."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise, product
from statistics import median

import torch
from torch import Tensor, nn

from hope_hf import HopeCache
from hope_hf.common.progress import progress
from hope_hf.frozen import memory_mixers

from .flags import Arguments, parse_lengths
from .held_out import held_out_documents
from .result import CannotRun, Row, SuiteResult, summary_row
from .streams import memory_states, piece_ends
from .subject import Subject

GATE_TOKENS = 2048
DEFAULT_STRESS_LENGTHS = "1k,16k"
LIMITED_STRESS_LENGTHS = "1k"


def memory(args: Arguments, subject: Subject) -> SuiteResult:
    """Learning rates and horizons per head on held-out text, and the largest state under unusual inputs.

    Horizon: 1 / (1 - alpha), the tokens after which a write has decayed to 1/e. A model that forgets within two tokens
    has no useful memory.
    """
    texts = []
    for ids in held_out_documents(args).head(args.limit).encoded(subject.encode):
        texts.append(ids[:GATE_TOKENS])
    texts.sort(key=len)
    longest = []
    for ids in texts[-args.samples_per_length :]:
        longest.append(torch.tensor([[subject.start, *ids]]))
    gates = gate_rows(subject, longest)
    default_lengths = LIMITED_STRESS_LENGTHS if args.limit else DEFAULT_STRESS_LENGTHS
    lengths = parse_lengths(args.lengths or default_lengths)
    unusual = stress(args, subject, lengths)
    horizon = median(row["horizon_median"] for row in gates)
    largest = max(row["largest_weight"] for row in unusual)
    summary = [
        summary_row("tokens that a write lasts (horizon), median of the heads", horizon, None),
        summary_row(f"largest weight after {lengths[-1]:,} unusual tokens", largest, None),
    ]
    return SuiteResult({"Gates by layer and head": gates, "State under unusual inputs": unusual}, summary=summary)


@torch.no_grad()
def gate_rows(subject: Subject, texts: list[Tensor]) -> list[Row]:
    """A row per layer and head: mean and standard deviation over tokens of the rate, quartiles of the horizon."""
    mixers = memory_mixers(subject.model)
    recorders = []
    for mixer in mixers.values():
        recorders.append(_GateRecorder(mixer))
    try:
        for text in texts:
            subject.model(input_ids=text.to(subject.model.device), use_cache=False, logits_to_keep=1)
    finally:
        for recorder in recorders:
            recorder.handle.remove()
    rows = []
    for layer, recorder in zip(mixers, recorders, strict=True):
        rate = torch.cat(recorder.rates)
        retention = torch.cat(recorder.retentions)
        for head in range(rate.shape[1]):
            row = {"layer": layer, "head": head}
            rows.append(row | _head_row(rate[:, head], retention[:, head]))
    return rows


class _GateRecorder:
    """Keeps the gates of a mixer for every token that it reads, [tokens, heads] a call, until `handle` is removed."""

    def __init__(self, mixer: nn.Module):
        self.rates: list[Tensor] = []
        self.retentions: list[Tensor] = []
        self.handle = mixer.register_forward_pre_hook(self.record)

    def record(self, mixer: nn.Module, arguments: tuple) -> None:
        rate, retention = mixer.gate_values(arguments[0])
        self.rates.append(rate.flatten(0, 1).float().cpu())
        self.retentions.append(retention.flatten(0, 1).float().cpu())


def _head_row(rate: Tensor, retention: Tensor) -> Row:
    """A head's gates over tokens [N]."""
    horizons = 1 / (1 - retention.double()).clamp(min=1e-9)
    shares = torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)
    low, middle, high = horizons.quantile(shares).tolist()
    return {
        "n": len(rate),
        "rate_mean": float(rate.mean()),
        "rate_std": float(rate.std()),
        "horizon_25": low,
        "horizon_median": middle,
        "horizon_75": high,
    }


# Values added to the biases of the gates: (learning rate, time step of forgetting).
GATES = {"as learned": (0.0, 0.0), "writing most, forgetting nothing": (15.0, -15.0)}


def stress(args: Arguments, subject: Subject, lengths: list[int]) -> list[Row]:
    """A row per setting of the gates, input and length: largest weight of any memory, largest logit.

    Raises ValueError if these are not finite.
    """
    longest = lengths[-1]
    generator = torch.Generator().manual_seed(args.seed)
    vocab_size = subject.model.config.vocab_size
    random_ids = torch.randint(vocab_size, (1, longest), generator=generator)
    in_turn = torch.arange(longest) % 2
    inputs = {
        "random tokens": random_ids,
        "one token": random_ids[:, :1].expand(-1, longest),
        "two tokens in turn": random_ids[:, in_turn],
    }
    total = len(GATES) * len(inputs) * longest
    rows = []
    with progress(None, "memory: unusual inputs", total) as bar:
        for (gates, shifts), (name, ids) in product(GATES.items(), inputs.items()):
            with _shifted_gates(subject, *shifts):
                for row in _read(subject, ids, lengths, bar):
                    largest = row["largest_weight"] + row["largest_logit"]
                    if not math.isfinite(largest):
                        where = f"{row['tokens']:,} {name}, gates {gates}"
                        raise CannotRun(f"memory: the state is not finite after {where}: the model diverges.")
                    rows.append({"gates": gates, "input": name, **row})
    return rows


@torch.no_grad()
def _read(subject: Subject, ids: Tensor, lengths: list[int], bar) -> Iterator[Row]:
    """Largest weight of the memories and largest logit so far, after each of the lengths of one text [1, T]."""
    cache = HopeCache(subject.model.config)
    largest_logit = torch.tensor(0.0)
    for start, end in pairwise([0, *piece_ends(lengths[-1], lengths)]):
        piece = ids[:, start:end].to(subject.model.device)
        logits = subject.model(piece, cache=cache).logits
        largest_here = logits.abs().max().float().cpu()
        # Not Python's max(), which would drop a NaN.
        largest_logit = torch.maximum(largest_logit, largest_here)
        bar.update(end - start)
        if end in lengths:
            weights = []
            for state in memory_states(cache):
                weights.append(state.abs().max().cpu())
            largest_weight = torch.stack(weights).max()
            yield {
                "tokens": end,
                "largest_weight": float(largest_weight),
                "largest_logit": float(largest_logit),
            }


@contextmanager
def _shifted_gates(subject: Subject, rate: float, forgetting: float) -> Iterator[None]:
    """Inside, the biases of the gates are larger by `rate` (learning rate) and `forgetting` (time step)."""
    shifts = []
    for mixer in memory_mixers(subject.model).values():
        shifts.append((mixer.gates.learning_rate_bias, rate))
        shifts.append((mixer.gates.dt_bias, forgetting))
    learned = []
    for bias, _ in shifts:
        learned.append(bias.detach().clone())
    try:
        for bias, shift in shifts:
            bias.data.add_(shift)
        yield
    finally:
        for (bias, _), values in zip(shifts, learned, strict=True):
            bias.data.copy_(values)
