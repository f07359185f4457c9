"""Tiny models whose levels learn much from a text, and texts for them."""

import torch

TEACHES = dict(periods=[8], rate=0.3, drift=2.0, gate=False, brake=0.0)
ALL = ["gate_proj", "up_proj", "down_proj"]


def one_level(tiny_model, dtype=torch.float64, learning=TEACHES, **options):
    """A tiny model with one level a block, which learns much."""
    options = dict(level_periods=[1], level_intermediate_sizes=[40], num_hidden_layers=3) | options
    if "layer_types" in options:
        options["layer_types"] = (options["layer_types"] * 2)[: options["num_hidden_layers"]]
    return tiny_model(dtype, level_learning=learning, **options)
