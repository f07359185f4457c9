"""`--gradient_checkpointing`: activations that the backward pass recomputes instead of reading stored ones."""

from collections.abc import Callable
from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from .recompute_flag import Recomputed

# Names of a block's sequence mixer in transformers; a hybrid has one of them in each block.
MIXERS = frozenset("mixer self_attn linear_attn attn attention self_attention mamba temporal_block".split())


def recompute_activations(model: PreTrainedModel, what: Recomputed) -> None:
    """Make an unwrapped causal LM recompute `what` in its backward pass.

    Names of modules and parameters do not change, so weights of any setting load in any other. Raises ValueError if
    the architecture has no such part.
    """
    if what.part == "none":
        return
    blocks = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if what.part == "mixer":
        for mixer in _mixers(model, blocks):
            # Around `forward`, as transformers does for blocks: hooks of sharding engines stay outside.
            mixer.forward = partial(_recomputing, mixer.forward)
        return
    kind = model.config.model_type
    if not model.supports_gradient_checkpointing or (what.every > 1 and not blocks):
        raise ValueError(f"--gradient_checkpointing finds no blocks in a {kind} that it could recompute: give none.")
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable({"use_reentrant": False})
    else:
        # For transformers before 5.23.
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for index, block in enumerate(blocks):
        block.gradient_checkpointing = index % what.every == 0


def _mixers(model: PreTrainedModel, blocks: list[nn.Module]) -> list[nn.Module]:
    mixers = []
    for block in blocks:
        of_block = [part for name, part in block.named_children() if name in MIXERS]
        if not of_block:
            mixers = []
            break
        mixers += of_block
    if not mixers:
        raise ValueError(
            f"--gradient_checkpointing mixer finds no sequence mixer in the blocks of a {model.config.model_type}: "
            "give block."
        )
    return mixers


def _recomputing(forward: Callable, *args, **kwargs):
    """A module's `forward`, which stores only its inputs in training."""
    if not forward.__self__.training:
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)
