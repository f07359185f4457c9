"""What the memories have learned to do: their gates, and how far their state goes under the worst inputs."""

import torch
from torch import Tensor

from hope_hf import HopeCache

from .arguments import Arguments
from .parsing import parse_lengths
from .result import Row, SuiteResult
from .streams import PIECE
from .subject import Subject, held_out_documents

GATE_TOKENS = 2048
DEFAULT_STRESS_LENGTHS = "1k,16k"


def memory(args: Arguments, subject: Subject) -> SuiteResult:
    """Learning rates and horizons per head on held-out text, and the largest state under unusual inputs.

    Horizon: 1 / (1 - alpha), the tokens after which a write has faded to 1/e. A model that forgets within two tokens
    has no memory to show.
    """
    texts, _ = held_out_documents(args)
    texts = texts[: args.limit]
    longest = sorted((subject.encode(text)[:GATE_TOKENS] for text in texts), key=len)[-args.samples_per_length :]
    gates = gate_rows(subject, [torch.tensor([[subject.start, *ids]]) for ids in longest])
    lengths = parse_lengths(args.lengths or DEFAULT_STRESS_LENGTHS)
    unusual = stress(args, subject, lengths)
    return SuiteResult({"Gates by layer and head": gates, "State under unusual inputs": unusual})


@torch.no_grad()
def gate_rows(subject: Subject, texts: list[Tensor]) -> list[Row]:
    """A row a layer and head: mean and standard deviation over tokens of the rate, quartiles of the horizon."""
    found = {}

    def record(layer):
        def hook(mixer, arguments):
            gates = mixer.gate_values(arguments[0])
            found.setdefault(layer, []).append([gate.flatten(0, 1).float().cpu() for gate in gates])

        return hook

    mixers = [block.mixer for block in subject.model.model.layers]
    handles = [mixer.register_forward_pre_hook(record(layer)) for layer, mixer in enumerate(mixers)]
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


def stress(args: Arguments, subject: Subject, lengths: list[int]) -> list[Row]:
    """A row an input and length: the largest weight of any memory and the largest logit. ValueError if not finite."""
    vocabulary, generator = subject.model.config.vocab_size, torch.Generator().manual_seed(args.seed)
    iid = torch.randint(vocabulary, (1, lengths[-1]), generator=generator)
    inputs = {
        "random tokens": iid,
        "one token": iid[:, :1].expand(-1, lengths[-1]),
        "two tokens in turn": iid[:, torch.arange(lengths[-1]) % 2],
    }
    rows = []
    for name, ids in inputs.items():
        cache, read = HopeCache(subject.model.config), 0
        largest_logit = 0.0
        for length in lengths:
            while read < length:
                end = min(read + PIECE, length)
                with torch.no_grad():
                    logits = subject.model(ids[:, read:end].to(subject.model.device), past_key_values=cache).logits
                largest_logit = max(largest_logit, float(logits.abs().max()))
                read = end
            largest = max(
                float(tensor.abs().max())
                for layer in cache.memory_layers
                for tensor in layer.state.values()
                if tensor.is_floating_point()
            )
            if not largest + largest_logit < float("inf"):
                raise ValueError(f"memory: the state is not finite after {length:,} of {name}: the model diverges.")
            rows.append({"input": name, "tokens": length, "largest_weight": largest, "largest_logit": largest_logit})
    return rows
