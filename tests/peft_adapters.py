"""Adapters of every kind that PEFT lists, far from their start, on a tiny model."""

import copy
import warnings

import torch
from peft import PeftModel, PeftType, get_peft_model
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from transformers import PreTrainedModel

# One linear map of a mixer and one of a level, in models of width 32.
LAYERS = ["mixer.q_proj", "levels.0.up_proj"]
# What kinds need beside a rank of 4.
_OPTIONS = {
    "IA3": dict(feedforward_modules=[]),
    "LN_TUNING": dict(target_modules=["norm"]),
    "TRAINABLE_TOKENS": dict(token_indices=[3, 5], target_modules=["embed_tokens"]),
    "ADALORA": dict(total_step=10),
    "OFT": dict(oft_block_size=8, r=0),
    "BOFT": dict(boft_block_size=8),
    "C3A": dict(block_size=8),
    "VBLORA": dict(vector_length=8, num_vectors=16),
    "FOURIERFT": dict(n_frequency=20),
    "WAVEFT": dict(n_frequency=20),
    "ROAD": dict(group_size=8),
}
# Learned prompts, which have no layers, and four that want a model or a call of their own.
WITHOUT_LAYERS = {
    "PROMPT_TUNING", "MULTITASK_PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING", "CPT", "CARTRIDGE", "ADAPTION_PROMPT",
    "POLY", "XLORA", "SHADOW",
}  # fmt: skip
KINDS = sorted(kind.value for kind in PeftType if kind.value not in WITHOUT_LAYERS)


def config_of(kind: str, **options):
    """The config of an adapter."""
    known = PEFT_TYPE_TO_CONFIG_MAPPING[kind]
    given = {"r": 4, "target_modules": LAYERS} | _OPTIONS.get(kind, {}) | options
    fields = known.__dataclass_fields__
    return known(task_type="CAUSAL_LM", **{name: value for name, value in given.items() if name in fields})


def shake(model: PeftModel, adapter: str = "default", seed: int = 0) -> PeftModel:
    """Add random numbers to what an adapter trains."""
    draws = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.requires_grad and f".{adapter}." in f"{name}.":
                weight.add_(0.05 * torch.randn(weight.shape, generator=draws))
    return model.eval()


def adapted(model: PreTrainedModel, kind: str = "LORA", adapter: str = "default", **options) -> PeftModel:
    """A copy of a model with an adapter that changes its logits."""
    with warnings.catch_warnings():
        # what PEFT says about tied weights, and its own deprecations
        warnings.simplefilter("ignore")
        return shake(get_peft_model(copy.deepcopy(model), config_of(kind, **options), adapter_name=adapter), adapter)
