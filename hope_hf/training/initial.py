"""The initial weights of a run; `--init sharded` is for models that no machine can build as a whole.

With it the model is sharded on the meta device, and each process fills its own slices. It reads them from weights in
files, or draws new ones with the random numbers of an unsharded build, one block in memory at a time.
"""

import socket
from collections.abc import Callable, Iterable
from dataclasses import replace

import torch
from accelerate import init_empty_weights
from accelerate.utils import gather_object
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.modules.module import register_module_module_registration_hook
from transformers import PreTrainedModel

from hope_hf.common.gpus import GIB
from hope_hf.common.models import build_model
from hope_hf.common.process import MISTAKES, trim_memory
from hope_hf.common.run_arguments import Arguments
from hope_hf.common.weights import weight_files

from .checkpoints.manifest import Manifest
from .checkpoints.weights import WeightParts, WholeWeights, check_fits, stored_weights
from .engines.base import Engine, Slice, like
from .engines.placement import free_memory


def build_on_meta(args: Arguments, config) -> PreTrainedModel:
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
    """The initial values of a new model: those that `build_model` would draw now."""

    def __init__(self, args: Arguments, config, model: PreTrainedModel, random: Tensor):
        """`model`: the result of `build_on_meta`, not sharded yet. `random`: the state of torch's generator to use."""
        self._build: Callable[[], PreTrainedModel] = lambda: build_model(args, config)
        self._random = random
        self._roots = {type(own): name for name, own in model.named_modules() if isinstance(own, PreTrainedModel)}
        self._tied = {*model.all_tied_weights_keys}
        self._names = {name for name, _ in model.named_parameters()} - self._tied

    @torch.no_grad()
    def fill(self, slices: Iterable[Slice]) -> None:
        """Set this process's slices of all parameters."""
        held = {name: own for own in slices for name in own.names}
        missing = {*self._names}

        def receive(name: str, values: Tensor) -> None:
            if name not in self._tied:
                own, start = held[name].tensors["weight"], held[name].start
                own.copy_(values.view(-1)[start : start + len(own)])
                missing.discard(name)

        torch.set_rng_state(self._random)
        draw_by_block(self._build, receive, self._roots)
        assert not missing, f"{missing} was not drawn"


class StoredValues:
    """Weights in files: each process reads its own slices."""

    def __init__(self, stored: WholeWeights | WeightParts):
        self._stored = stored

    @torch.no_grad()
    def fill(self, slices: Iterable[Slice]) -> None:
        """Set this process's slices of all weights."""
        with self._stored as stored:
            for own in slices:
                name = next(name for name in own.names if name in stored.like)
                stored.read_into(own.tensors["weight"], own.start, name)


def pretrained_values(args: Arguments, config, model: PreTrainedModel) -> StoredValues:
    """The weights of `--model_name_or_path`, for the model of `build_on_meta`.

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
    """The weights of a checkpoint, for the model of `build_on_meta`; ValueError if they do not fit."""
    with stored_weights(manifest) as stored:
        check_fits(model, stored, manifest.folder)
    return StoredValues(stored_weights(manifest))


def draw_by_block(
    build: Callable[[], PreTrainedModel], receive: Callable[[str, Tensor], None], roots: dict[type, str]
) -> PreTrainedModel:
    """Build a model whose parameters end on the meta device, one block at a time.

    Random values are drawn twice: in the constructor of every layer, and in transformers' initialisation, whose values
    count. The first values are freed as soon as a layer has its place. For the second, all parameters of a block (or
    of a module outside of blocks) are real at once, since modules copy from others of their block.

    Args:
        build: makes the model on the CPU and initialises it.
        receive: called with the name and the initial values of each parameter, which are freed afterwards. Tied
            parameters have one call each, as if they were not tied.
        roots: by class, the name within the whole model of every transformers model that it contains.

    Raises:
        ValueError: the model sets a value outside of its initialisation, or changes a block that is done.
    """
    blocks = _Blocks(receive, roots)
    original = PreTrainedModel._initialize_weights

    def initialize(root: PreTrainedModel, module: nn.Module, *options):
        if not getattr(module, "_is_hf_initialized", False):
            blocks.enter(root, module)
        original(root, module, *options)

    hook = register_module_module_registration_hook(lambda parent, name, module: blocks.free(module))
    PreTrainedModel._initialize_weights = initialize
    try:
        model = build()
        blocks.close(model)
    finally:
        PreTrainedModel._initialize_weights = original
        hook.remove()
    return model


class _Blocks:
    """The block that is being initialised, and those that are done."""

    def __init__(self, receive: Callable[[str, Tensor], None], roots: dict[type, str]):
        self._receive, self._roots = receive, roots
        # By root: the block of each module that is in one, and the names of all modules.
        self._known: dict[PreTrainedModel, tuple[dict, dict]] = {}
        self._current: nn.Module | None = None
        self._real: list[tuple[nn.Module, str, nn.Parameter, str]] = []
        self._done: list[tuple[str, nn.Parameter, int]] = []

    def free(self, module: nn.Module) -> None:
        """Move the parameters that a new module has itself to the meta device."""
        for key, parameter in module._parameters.items():
            if parameter is not None and not parameter.is_meta:
                module._parameters[key] = like(parameter, "meta")

    def enter(self, root: PreTrainedModel, module: nn.Module) -> None:
        """Make the parameters real that the initialisation of this module may set."""
        if root not in self._known:
            wanted = root._no_split_modules or ()
            blocks = [block for block in root.modules() if type(block).__name__ in wanted]
            prefix = self._roots[type(root)]
            names = {own: f"{prefix}.{name}".strip(".") for name, own in root.named_modules()}
            self._known[root] = {own: block for block in blocks for own in block.modules()}, names
        block_of, names = self._known[root]
        block = block_of.get(module, module)
        if block is self._current:
            return
        self._leave()
        self._current = block
        for own in block.modules() if block in block_of else (block,):
            self.free(own)
            for key, parameter in own._parameters.items():
                if parameter is not None:
                    self._real.append((own, key, parameter, f"{names[own]}.{key}"))
                    own._parameters[key] = like(parameter, "cpu")

    def close(self, model: PreTrainedModel) -> None:
        """Hand over the last block; check that all parameters were initialised, and not changed afterwards."""
        self._leave()
        for name, parameter in model.named_parameters():
            if not parameter.is_meta:
                raise ValueError(_refusal(name))
        for name, parameter, version in self._done:
            if parameter._version != version:
                raise ValueError(_refusal(name))

    def _leave(self) -> None:
        for module, key, parameter, name in self._real:
            real = module._parameters[key]
            # Counts changes in place: without any, the values are not initial ones but whatever the memory had.
            if not real._version:
                raise ValueError(_refusal(name))
            self._receive(name, real.detach())
            module._parameters[key] = parameter
            self._done.append((name, parameter, parameter._version))
        self._real.clear()
        trim_memory()


def _refusal(name: str) -> str:
    return f"--init sharded cannot draw {name}, which this model sets in its own way: leave --init out."


# The dtype in which all models train.
DTYPE = torch.float32


def built_bytes(args: Arguments, config, continues: bool) -> int:
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
    return sum(tensor.numel() for tensor in tensors) * DTYPE.itemsize


def build_fake(args: Arguments, config) -> PreTrainedModel:
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
