"""Fills the shards of a model that was sharded on the meta device: each process takes its part of every weight."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import replace

import torch
from accelerate import init_empty_weights
from torch import Tensor
from transformers import PreTrainedModel

from hope_hf.cli.models import build_model
from hope_hf.cli.weights import weight_files
from hope_hf.step.arguments import Arguments

from ..checkpoints.manifest import Manifest
from ..checkpoints.weights import StoredWeights, WholeWeights, check_fits, stored_weights
from ..engines.base import Slice
from .by_block import draw_by_block


def build_on_meta(args: Arguments, config) -> PreTrainedModel:
    """The model of the flags with its parameters on the meta device and real buffers; errors as `build_model`.

    It draws random numbers, though not those of the model.
    """
    with init_empty_weights(include_buffers=False):
        new = build_model(replace(args, model_name_or_path=None), config)
    new.tie_weights()
    if not args.model_name_or_path:
        return new
    loaded = build_model(args, config, device_map="meta")
    for name, buffer in new.named_buffers():
        owner, _, key = name.rpartition(".")
        loaded.get_submodule(owner)._buffers[key] = buffer
    return loaded


class DrawnValues:
    """The initial values of a new model: `build_model` would draw the same now."""

    def __init__(self, args: Arguments, config, model: PreTrainedModel, random: Tensor):
        """`model`: from `build_on_meta`, not sharded yet. `random`: the state of torch's generator to draw with."""
        self._build: Callable[[], PreTrainedModel] = lambda: build_model(args, config)
        self._random = random
        self._roots = {type(own): name for name, own in model.named_modules() if isinstance(own, PreTrainedModel)}
        self._tied = {*model.all_tied_weights_keys}
        self._names = {name for name, _ in model.named_parameters()} - self._tied

    @torch.no_grad()
    def fill(self, slices: Iterable[Slice]) -> None:
        """Set this process's parts of all parameters."""
        parts = {name: part for part in slices for name in part.names}
        missing = {*self._names}

        def receive(name: str, values: Tensor) -> None:
            if name not in self._tied:
                own, start = parts[name].tensors["weight"], parts[name].start
                own.copy_(values.view(-1)[start : start + len(own)])
                missing.discard(name)

        torch.set_rng_state(self._random)
        draw_by_block(self._build, receive, self._roots)
        assert not missing, f"{missing} was not drawn"


class StoredValues:
    """Weights in files: each process reads its parts alone."""

    def __init__(self, stored: AbstractContextManager[StoredWeights]):
        self._stored = stored

    @torch.no_grad()
    def fill(self, slices: Iterable[Slice]) -> None:
        """Set this process's parts of all weights."""
        with self._stored as stored:
            for part in slices:
                name = next(name for name in part.names if name in stored.like)
                stored.read_into(part.tensors["weight"], part.start, name)


def pretrained_values(args: Arguments, config, model: PreTrainedModel) -> StoredValues:
    """Those of `--model_name_or_path`, for the model of `build_on_meta`.

    Raises ValueError if the files have them under other names, or in other shapes.
    """
    named = f"--model_name_or_path {args.model_name_or_path}"
    files = weight_files(args.model_name_or_path, getattr(config, "transformers_weights", None), named)
    prefix = f"{model.base_model_prefix}."
    with WholeWeights(files) as stored:
        saved = stored.like
    # A base model's own files lack the prefix.
    names = {f"{prefix}{name}": name for name in saved} | {name: name for name in saved}
    tied: dict[Tensor, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        tied.setdefault(tensor, []).append(name)
    for tensor, own in tied.items():
        found = next((saved[names[name]] for name in own if name in names), None)
        if found is None or found.shape != tensor.shape:
            raise ValueError(
                f"{named} has {own[0]} in a form that --init sharded does not read: save the model again with "
                "save_pretrained(..., save_original_format=False), or leave --init out."
            )
    return StoredValues(WholeWeights(files, names))


def checkpoint_values(model: PreTrainedModel, manifest: Manifest) -> StoredValues:
    """Those of a checkpoint, for the model of `build_on_meta`; ValueError if they do not fit."""
    with stored_weights(manifest) as stored:
        check_fits(model, stored, manifest.folder)
    return StoredValues(stored_weights(manifest))
