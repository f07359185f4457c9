"""The model that retains tokens, made of one with windows."""

import copy
import math

from hope_hf import HopeConfig, HopeForCausalLM
from hope_hf.common.weights import with_layers_of

from .fit import fit_layers, read_texts, share_out
from .texts import AskedText

WINDOW, RETAINING = "window_attention", "retaining_attention"
KINDS = (WINDOW, RETAINING, "full_attention")


def layers_with_windows(config: HopeConfig) -> list[int]:
    """The layers that can retain tokens. ValueError if there are none, or other layers than of softmax attention."""
    layers = []
    for layer, kind in enumerate(config.layer_types):
        if kind not in KINDS:
            raise ValueError(f"has layers of type '{kind}', and retaining is learned from softmax attention alone")
        if kind in (WINDOW, RETAINING):
            layers.append(layer)
    if not layers:
        raise ValueError("has no layer with a window: convert it with --sliding_window")
    return layers


def retaining_layers(config: HopeConfig) -> list[int]:
    """The layers that retain tokens."""
    layers = []
    for layer, kind in enumerate(config.layer_types):
        if kind == RETAINING:
            layers.append(layer)
    return layers


def learn_to_retain(
    model: HopeForCausalLM, texts: list[AskedText], mean: int, layers: list[int] | None
) -> HopeForCausalLM:
    """A model with the same weights, some of whose layers retain older tokens; `config.retained_tokens` says how many.

    Args:
        model: has windows, and softmax attention alone; it may retain tokens already.
        texts: training texts, longer than the window.
        mean: tokens that a head of these layers retains, on average.
        layers: the layers that retain; `None`: the third of those with windows that lacks most without older tokens.
    """
    if layers is None:
        candidates = layers_with_windows(model.config)
        number = math.ceil(len(candidates) / 3)
    else:
        candidates = layers
        number = len(layers)
    readings = read_texts(model, texts, candidates, number)
    scores_by_layer, scores = fit_layers(readings)
    counts = share_out(scores, len(texts), mean)
    config = retaining_config(model.config, list(scores_by_layer), counts)
    buffers = {}
    for layer, scores_of_layer in scores_by_layer.items():
        for name, tensor in scores_of_layer.items():
            buffers[f"model.layers.{layer}.mixer.scores.{name}"] = tensor.cpu()
    retaining = with_layers_of(config, model.cpu(), buffers)
    retaining.generation_config = model.generation_config
    return retaining


def retaining_config(config: HopeConfig, layers: list[int], counts: list[int]) -> HopeConfig:
    """The configuration in which these layers retain tokens, and all others with a window do not.

    `counts` are the tokens of each head of the first layer, then of the next one.
    """
    config = copy.deepcopy(config)
    for layer in layers_with_windows(config):
        config.layer_types[layer] = RETAINING if layer in layers else WINDOW
    heads = config.num_key_value_heads
    config.retained_tokens = []
    for first in range(0, len(counts), heads):
        config.retained_tokens.append(counts[first : first + heads])
    config.validate()
    return config
