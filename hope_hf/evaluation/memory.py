"""Measures the memories: their gates, and how large their state becomes under unusual inputs."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from statistics import median

import torch
from torch import Tensor

from hope_hf import HopeCache
from hope_hf.frozen import memory_mixers

from .display import progress
from .flags import MODEL, TEXT, Arguments, parse_lengths, suite
from .held_out import held_out_documents
from .result import CannotRun, Row, SuiteResult, summary_row
from .streams import PIECE, memory_states
from .subject import Subject

GATE_TOKENS = 2048
DEFAULT_STRESS_LENGTHS = "1k,16k"
LIMITED_STRESS_LENGTHS = "1k"


@suite(*MODEL, *TEXT, "lengths", "samples_per_length", "limit", "seed", needs_memory=True)
def memory(args: Arguments, subject: Subject) -> SuiteResult:
    """Learning rates and horizons per head on held-out text, and the largest state under unusual inputs.

    Horizon: 1 / (1 - alpha), the tokens after which a write has decayed to 1/e. A model that forgets within two tokens
    has no useful memory.
    """
    texts = held_out_documents(args).head(args.limit).encoded(subject.encode)
    longest = sorted((ids[:GATE_TOKENS] for ids in texts), key=len)[-args.samples_per_length :]
    gates = gate_rows(subject, [torch.tensor([[subject.start, *ids]]) for ids in longest])
    lengths = parse_lengths(args.lengths or (LIMITED_STRESS_LENGTHS if args.limit else DEFAULT_STRESS_LENGTHS))
    unusual = stress(args, subject, lengths)
    horizon = median(row["horizon_median"] for row in gates)
    largest = max(row["largest_weight"] for row in unusual)
    found = [
        summary_row("tokens that a write lasts (horizon), median of the heads", horizon, None),
        summary_row(f"largest weight after {lengths[-1]:,} unusual tokens", largest, None),
    ]
    return SuiteResult({"Gates by layer and head": gates, "State under unusual inputs": unusual}, summary=found)


@torch.no_grad()
def gate_rows(subject: Subject, texts: list[Tensor]) -> list[Row]:
    """A row per layer and head: mean and standard deviation over tokens of the rate, quartiles of the horizon."""
    found = {}

    def record(layer):
        def hook(mixer, arguments):
            gates = mixer.gate_values(arguments[0])
            found.setdefault(layer, []).append([gate.flatten(0, 1).float().cpu() for gate in gates])

        return hook

    mixers = memory_mixers(subject.model)
    handles = [mixer.register_forward_pre_hook(record(layer)) for layer, mixer in mixers.items()]
    try:
        for text in texts:
            subject.model(input_ids=text.to(subject.model.device), use_cache=False, logits_to_keep=1)
    finally:
        for handle in handles:
            handle.remove()
    rows = []
    for layer, values in found.items():
        rates, retentions = (torch.cat(parts) for parts in zip(*values, strict=True))
        for head in range(rates.shape[1]):
            horizons = 1 / (1 - retentions[:, head].double()).clamp(min=1e-9)
            quartiles = horizons.quantile(torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)).tolist()
            rows.append(
                {
                    "layer": layer,
                    "head": head,
                    "n": len(rates),
                    "rate_mean": float(rates[:, head].mean()),
                    "rate_std": float(rates[:, head].std()),
                    **dict(zip(("horizon_25", "horizon_median", "horizon_75"), quartiles, strict=True)),
                }
            )
    return rows


# Values added to the biases of the gates: (learning rate, time step of forgetting).
GATES = {"as learned": (0.0, 0.0), "writing most, forgetting nothing": (15.0, -15.0)}


def stress(args: Arguments, subject: Subject, lengths: list[int]) -> list[Row]:
    """A row per setting of the gates, input and length: largest weight of any memory, largest logit.

    Raises ValueError if these are not finite.
    """
    vocabulary, generator = subject.model.config.vocab_size, torch.Generator().manual_seed(args.seed)
    iid = torch.randint(vocabulary, (1, lengths[-1]), generator=generator)
    inputs = {
        "random tokens": iid,
        "one token": iid[:, :1].expand(-1, lengths[-1]),
        "two tokens in turn": iid[:, torch.arange(lengths[-1]) % 2],
    }
    total = len(GATES) * len(inputs) * lengths[-1]
    rows = []
    with progress(None, "memory: unusual inputs", total) as bar:
        for gates, shifts in GATES.items():
            with _shifted_gates(subject, *shifts):
                for name, ids in inputs.items():
                    for row in _read(subject, ids, lengths, bar):
                        where = f"{row['tokens']:,} {name}, gates {gates}"
                        if not row["largest_weight"] + row["largest_logit"] < float("inf"):
                            raise CannotRun(f"memory: the state is not finite after {where}: the model diverges.")
                        rows.append({"gates": gates, "input": name, **row})
    return rows


@torch.no_grad()
def _read(subject: Subject, ids: Tensor, lengths: list[int], bar) -> Iterator[Row]:
    """Largest weight of the memories and largest logit so far, after each of the lengths of one text [1, T]."""
    cache, largest_logit = HopeCache(subject.model.config), 0.0
    ends = sorted({*range(PIECE, lengths[-1], PIECE), *lengths})
    for start, end in pairwise([0, *ends]):
        logits = subject.model(ids[:, start:end].to(subject.model.device), cache=cache).logits
        # Not Python's max(), which would drop a NaN.
        largest_logit = float(torch.stack([torch.tensor(largest_logit), logits.abs().max().float().cpu()]).max())
        bar.update(end - start)
        if end in lengths:
            largest = float(torch.stack([tensor.abs().max().cpu() for tensor in memory_states(cache)]).max())
            yield {"tokens": end, "largest_weight": largest, "largest_logit": largest_logit}


@contextmanager
def _shifted_gates(subject: Subject, rate: float, forgetting: float) -> Iterator[None]:
    biases = [
        (getattr(mixer.gates, name), shift)
        for mixer in memory_mixers(subject.model).values()
        for name, shift in (("learning_rate_bias", rate), ("dt_bias", forgetting))
    ]
    learned = [bias.detach().clone() for bias, _ in biases]
    try:
        for bias, shift in biases:
            bias.data.add_(shift)
        yield
    finally:
        for (bias, _), before in zip(biases, learned, strict=True):
            bias.data.copy_(before)
