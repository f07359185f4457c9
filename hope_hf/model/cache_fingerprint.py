"""Which model wrote a cache: a short name that follows from its configuration and weights."""

import hashlib
import json

import torch
from transformers.modeling_utils import PreTrainedModel

# Entries of every weight that take part, spread evenly over it.
_SAMPLE = 64
# What says nothing about how a text is read.
_IRRELEVANT = {
    "_name_or_path", "architectures", "auto_map", "dtype", "transformers_version", "use_cache", "recompute_chunks",
    "level_periods",
}  # fmt: skip


def fingerprint(model: PreTrainedModel) -> str:
    """A hash of 16 hexadecimal digits of a model's configuration and of a sample of all its weights.

    Weights are rounded to bfloat16 first: loaded in half precision or moved to another device it is the same model.
    """
    config = {key: value for key, value in model.config.to_dict().items() if key not in _IRRELEVANT}
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    # Of the trunk alone: heads do not change what is read.
    for name, weight in sorted(model.base_model.named_parameters()):
        flat = weight.detach().flatten()
        places = torch.linspace(0, len(flat) - 1, min(_SAMPLE, len(flat)), dtype=torch.float64).long()
        sample = flat[places.to(flat.device)].to("cpu", torch.bfloat16).view(torch.int16)
        digest.update(f"{name} {list(weight.shape)} {sample.tolist()}".encode())
    return digest.hexdigest()[:16]
