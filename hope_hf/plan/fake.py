"""Models and steps on fake tensors, which have shapes but no numbers: any model in the memory of one process."""

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from accelerate.utils import convert_outputs_to_fp32
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
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
    if getattr(config, "layer_types", None):
        fields["layer_types"] = kinds
        # the name in HOPE's files
        fields.pop("mixer_types", None)
    return type(config).from_dict(fields)


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


@contextmanager
def as_if_real(fake: FakeTensorMode, model: PreTrainedModel, tokens: int, in_place: bool) -> Iterator[None]:
    """Run a step of `model` on fake tensors, of texts of `tokens` tokens.

    `in_place`: whether the two gradients of a tied embedding are added in place; under FSDP both exist at once.
    """
    config = model.config
    real = _AsIfReal()
    if config.model_type == "hope":
        # Queries are padded to whole blocks.
        real.queries = tokens + -tokens % config.sparse_block_size
    if in_place:
        real.embedding = model.get_input_embeddings().weight.shape
    # Parts of torch warn because they expect real tensors.
    with warnings.catch_warnings(action="ignore"), fake, real:
        yield


class _AsIfReal(TorchDispatchMode):
    """Replaces operations that need the numbers of a tensor.

    - A boolean mask selects no elements, so checks of values (such as token ids) find nothing.
    - All `queries` of a row select the first block of sparse attention, as in every text, and no other block.
    - The two gradients of a tied `embedding` of this shape are added in place, as autograd does with real tensors.
    """

    embedding: torch.Size | None = None
    queries: int = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        aten = torch.ops.aten
        if function is aten.add.Tensor and self._adds_gradients_of_embedding(*args[:2]):
            function = aten.add_.Tensor
        if function is aten.index.Tensor:
            tensor, indices = args
            mask = _single_mask(indices)
            if mask is not None:
                return tensor.new_empty((0, *tensor.shape[mask.ndim :]))
        if function is aten.bincount.default and self.queries:
            return self._counts_of_blocks(number=args[0].numel(), bins=args[2])
        if function is aten._local_scalar_dense.default:
            if args[0].dtype is torch.bool:
                return False
            return 1.0 if args[0].is_floating_point() else 1
        return function(*args, **(kwargs or {}))

    def _adds_gradients_of_embedding(self, first: Tensor, second) -> bool:
        is_in_backward = torch._C._current_graph_task_id() != -1
        return is_in_backward and isinstance(second, Tensor) and first.shape == second.shape == self.embedding

    def _counts_of_blocks(self, number: int, bins: int) -> Tensor:
        """How many of `number` queries select each block; the last bin counts queries without a block."""
        with unset_fake_temporarily():
            counts = torch.zeros(bins, dtype=torch.long)
            counts[0] = min(self.queries, number)
            counts[-1] = number - counts[0]
            return counts


def _single_mask(indices: list[Tensor | None]) -> Tensor | None:
    """The boolean mask, if it is the only index."""
    tensors = [index for index in indices if index is not None]
    is_mask = len(tensors) == 1 and tensors[0].dtype is torch.bool
    return tensors[0] if is_mask else None


def hidden_states_of(output: Tensor | tuple) -> Tensor:
    """The hidden states [B, T, D] of what a block returns."""
    return output[0] if isinstance(output, tuple) else output


def parameters_of(module: nn.Module) -> list[nn.Parameter]:
    """The parameters that are trained."""
    return [parameter for parameter in module.parameters() if parameter.requires_grad]
