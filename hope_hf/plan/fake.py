"""Models and steps on fake tensors, which have shapes but no numbers: any model in the memory of one process."""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from accelerate.utils import convert_outputs_to_fp32
from transformers import AutoModelForCausalLM, PreTrainedModel

from hope_hf.common.precision import LOW_PRECISION

from .launch import Launch, StepOptions

# The variable that chooses the code of HOPE's operations.
KERNELS = "HOPE_KERNELS"
# Fields of configurations with the dropout rate of attention weights.
ATTENTION_DROPOUT = ("attention_dropout", "attn_pdrop")


def without_dropout(config):
    """The config without dropout of attention weights.

    With it the CPU's attention holds heads x tokens^2 numbers; GPU kernels never do.
    """
    rates = {name: 0.0 for name in ATTENTION_DROPOUT if getattr(config, name, 0)}
    return type(config).from_dict(config.to_dict() | rates)


def with_layers(config, kinds: list[str]):
    """The config of a model with these layers alone."""
    fields = config.to_dict() | {"num_hidden_layers": len(kinds)}
    if fields.get("retained_tokens"):
        # one layer stands for all of its kind
        fields["retained_tokens"] = [_mean_of_heads(fields["retained_tokens"])]
    if getattr(config, "layer_types", None):
        fields["layer_types"] = kinds
        # the name in HOPE's files
        fields.pop("mixer_types", None)
    return type(config).from_dict(fields)


def _mean_of_heads(counts: list[list[int]]) -> list[int]:
    """The mean of lists, head by head."""
    return [round(sum(of_head) / len(counts)) for of_head in zip(*counts, strict=True)]


def kinds_of_layers(config) -> list[str]:
    """The kind of each layer; "block" where the config names none."""
    kinds = getattr(config, "layer_types", None)
    return list(kinds) if kinds else ["block"] * config.num_hidden_layers


def runs_on_kernels(mixer, config, launch: Launch) -> bool:
    """Whether layers with this mixer of HOPE will run on kernels of GPUs, which fake tensors do not."""
    return not launch.on_cpu and mixer.expects_kernels(config)


def build(config, options: StepOptions) -> PreTrainedModel:
    """The causal LM of a step, on real or fake tensors."""
    flags = {"trust_remote_code": options.trust_remote_code}
    if options.attn_implementation:
        flags["attn_implementation"] = options.attn_implementation
    return AutoModelForCausalLM.from_config(config, **flags)


@contextmanager
def operators_of(on_cpu: bool) -> Iterator[None]:
    """Build models that run what a launch on CPUs runs, or torch's operators: fake tensors run no kernels of GPUs."""
    asked = os.environ.get(KERNELS)
    if asked not in ("plain", "torch"):
        os.environ[KERNELS] = "auto" if on_cpu else "torch"
    try:
        yield
    finally:
        if asked is None:
            del os.environ[KERNELS]
        else:
            os.environ[KERNELS] = asked


def autocast(precision: str) -> AbstractContextManager:
    """The context in which a model computes under a launch file's precision."""
    if precision not in LOW_PRECISION:
        return nullcontext()
    return torch.autocast("cpu", dtype=LOW_PRECISION[precision])


def in_precision(forward: Callable, precision: str) -> Callable:
    """A model's `forward` in bf16 or fp16, as `Accelerator.prepare_model` wraps it."""
    return convert_outputs_to_fp32(autocast(precision)(forward))
