"""Draws the initial values of a model with the random numbers of the ordinary way, holding one block at a time.

A model draws twice: every layer as it is made, then transformers' initialisation, which is what counts. Here the
values of the first time are freed as soon as a layer has its place. The second time the parameters of a block (or of a
module outside of blocks) are real from its first module to its last, since modules copy from others of their block.
"""

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from transformers import PreTrainedModel

from hope_hf.cli.process import trim_memory

from ..engines.meta import like


def draw_by_block(
    build: Callable[[], PreTrainedModel], receive: Callable[[str, Tensor], None], roots: dict[type, str]
) -> PreTrainedModel:
    """Build a model whose parameters end on the meta device, and return it.

    Args:
        build: makes the model on the CPU and initialises it.
        receive: called with the name and the initial values of each parameter, which are freed afterwards. Tied
            parameters have a call each, as if they were not tied.
        roots: the name in the whole model of every model of transformers that is in it.

    Raises:
        ValueError: the model sets a value outside of its initialisation, or of a block that is done.
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
        # By root: the block of each module in one, and the names of all.
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
        """Hand over the last block, and check that none was changed after its turn, and all had one."""
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
