"""The initial weights of a run; `--init sharded` is for models that no machine can build as a whole.

With it the model is built on the meta device and sharded there. Each process then fills its own slices: from weights
in files, or with new values that the model's own initialisation draws, one block in memory at a time.
"""

import socket
from collections.abc import Iterable
from dataclasses import replace

import torch
from accelerate import init_empty_weights
from accelerate.utils import gather_object
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from transformers import PreTrainedModel

from hope_hf.common.flags import ModelArguments
from hope_hf.common.gpus import GIB
from hope_hf.common.models import build_model
from hope_hf.common.process import MISTAKES, trim_memory
from hope_hf.common.weights import weight_files

from .checkpoints.manifest import Manifest
from .checkpoints.weights import WeightParts, WholeWeights, check_fits, stored_weights
from .engines.base import Engine, Slice
from .engines.placement import free_memory


def build_on_meta(args: ModelArguments, config) -> PreTrainedModel:
    """The model of the flags with its parameters on the meta device and real buffers; errors as `build_model`.

    It draws random numbers, but not those that `build_model` draws.
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
    """New values, drawn by the model's own `_init_weights`: they have its distributions, but not the random numbers
    of a model that is built as a whole."""

    def __init__(self, model: PreTrainedModel, seed: int):
        """`model`: a second result of `build_on_meta`, which is not sharded. `seed`: the same on all processes."""
        self._model = model
        self._seed = seed
        self._tied = set(model.all_tied_weights_keys)
        self._slices: dict[str, Slice] = {}

    @torch.no_grad()
    def fill(self, slices: Iterable[Slice]) -> None:
        """Set this process's slices of all parameters; ValueError if the model leaves a parameter unset."""
        self._slices = {name: part for part in slices for name in part.names}
        torch.manual_seed(self._seed)
        self._draw(self._model, "", self._model)

    def _draw(self, module: nn.Module, name: str, model: PreTrainedModel) -> None:
        """The values of a module and of those below it. `model`: the innermost one that contains the module."""
        if isinstance(module, PreTrainedModel):
            model = module
        # All modules of a block are in memory together, because some copy from others.
        is_block = type(module).__name__ in (model._no_split_modules or ())
        if not is_block:
            for child_name, child in module.named_children():
                self._draw(child, f"{name}.{child_name}".strip("."), model)
        module._apply(_not_a_number, recurse=is_block)
        if is_block:
            module.apply(model._init_weights)
        else:
            model._init_weights(module)
        for parameter_name, values in module.named_parameters(name, recurse=is_block):
            self._take(parameter_name, values)
        module._apply(lambda tensor: tensor.to("meta"), recurse=is_block)
        trim_memory()

    def _take(self, name: str, values: Tensor) -> None:
        if name in self._tied:
            return
        if values.isnan().any():
            raise ValueError(
                f"--init sharded cannot draw {name}, which this model sets in its own way: leave --init out."
            )
        target = self._slices[name].tensors["weight"]
        start = self._slices[name].start
        target.copy_(values.view(-1)[start : start + len(target)])


def _not_a_number(tensor: Tensor) -> Tensor:
    """Memory for a parameter on the meta device; what is still not a number afterwards was not initialised."""
    return torch.full_like(tensor, torch.nan, device="cpu") if tensor.is_meta else tensor


class StoredValues:
    """Weights in files: each process reads its own slices."""

    def __init__(self, stored: WholeWeights | WeightParts):
        self._stored = stored

    @torch.no_grad()
    def fill(self, slices: Iterable[Slice]) -> None:
        """Set this process's slices of all weights."""
        with self._stored as stored:
            for part in slices:
                name = next(name for name in part.names if name in stored.like)
                stored.read_into(part.tensors["weight"], part.start, name)


def pretrained_values(args: ModelArguments, config, model: PreTrainedModel) -> StoredValues:
    """The weights of `--model_name_or_path`, for the model of `build_on_meta`.

    Raises ValueError if the files have them under other names, or in other shapes.
    """
    named = f"--model_name_or_path {args.model_name_or_path}"
    files = weight_files(args.model_name_or_path, getattr(config, "transformers_weights", None), named)
    with WholeWeights(files) as stored:
        saved = stored.like
    names = {}
    for name in saved:
        # A base model's own files lack the prefix.
        names.setdefault(f"{model.base_model_prefix}.{name}", name)
        names[name] = name
    # One of the names of a tied weight is enough.
    read, missing = set(), {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if name in names and saved[names[name]].shape == tensor.shape:
            read.add(id(tensor))
        else:
            missing.setdefault(id(tensor), name)
    for tensor_id, name in missing.items():
        if tensor_id not in read:
            raise ValueError(
                f"{named} has {name} in a form that --init sharded does not read: save the model again with "
                "save_pretrained(..., save_original_format=False), or leave --init out."
            )
    return StoredValues(WholeWeights(files, names))


def checkpoint_values(model: PreTrainedModel, manifest: Manifest) -> StoredValues:
    """The weights of a checkpoint, for the model of `build_on_meta`; ValueError if they do not fit."""
    with stored_weights(manifest) as stored:
        check_fits(model, stored, manifest.folder)
    return StoredValues(stored_weights(manifest))


# The dtype in which all models train.
DTYPE = torch.float32


def built_bytes(args: ModelArguments, config, continues: bool) -> int:
    """Bytes of memory that one process needs to build the model.

    Weights that need no conversion count as nothing: all processes map the same pages of their file. `continues`: the
    run copies a checkpoint's weights into a new model.
    """
    if args.model_name_or_path and not continues:
        source = args.model_name_or_path
        try:
            with WholeWeights(weight_files(source, getattr(config, "transformers_weights", None), source)) as stored:
                tensors = [tensor for tensor in stored.like.values() if tensor.dtype != DTYPE]
        except MISTAKES:
            # Loading reports errors of the files.
            return 0
    else:
        tensors = build_on_meta(replace(args, model_name_or_path=None), config).parameters()
    return DTYPE.itemsize * sum(tensor.numel() for tensor in tensors)


def build_fake(args: ModelArguments, config) -> PreTrainedModel:
    """The model on fake tensors, which take no memory and stay where they are."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = build_model(replace(args, model_name_or_path=None), config)
    model.to = lambda *device: model
    return model


def is_fake(model: PreTrainedModel) -> bool:
    """Whether it comes from `build_fake`."""
    return any(isinstance(parameter, FakeTensor) for parameter in model.parameters())


def check_host_memory(size: int, engine: Engine) -> None:
    """ValueError on all processes if a machine's memory is too small for `size` bytes of each of its processes."""
    # Every process reads it before any process builds.
    everyone = gather_object([(socket.gethostname(), free_memory(torch.device("cpu")))])
    for host, free in everyone:
        processes = sum(other == host for other, _ in everyone)
        if free is None or processes * size <= free:
            continue
        fix = "give --init sharded"
        if not engine.fills_shards:
            fix = "launch several with accelerate_configs/fsdp2.yaml and --init sharded, or take a smaller model"
        raise ValueError(
            f"The model has {size / GIB:.1f} GiB, and {processes} process(es) on {host} build all of it: that needs "
            f"{processes * size / GIB:.1f} GiB of memory, and {free / GIB:.1f} GiB are free; {fix}."
        )
