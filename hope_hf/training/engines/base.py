"""The trainer's interface to a way of distributing a model. Here: one process, or whole replicas (DDP).

Sharding engines derive from `Engine` (`fsdp2.py`, `fsdp1.py`, `zero.py`); the launcher's environment decides which one
runs, and each checks that it is the one asked for. All processes call all methods.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import torch
from accelerate import Accelerator, PartialState
from torch import Tensor, distributed, nn
from transformers import PreTrainedModel

from hope_hf.common.files import share_weights
from hope_hf.common.precision import LOW_PRECISION
from hope_hf.common.run_arguments import MemoryArguments
from hope_hf.optim import RULES, LevelClock
from hope_hf.plan import STRATEGIES, Launch, Strategy

from .loss_scaling import LossScaling, TorchScaling


@dataclass
class EngineOptions(MemoryArguments):
    """The flags that decide how a model is distributed; see `hope_hf.common.run_arguments`."""

    output_dir: str | None = None
    dry_run: bool = False
    ddp_timeout: float = 1800.0
    per_device_train_batch_size: int = 8
    gradient_accumulation_steps: int = 1
    max_grad_norm: float = 1.0
    save_sharded: bool = False


@dataclass(frozen=True)
class Slice:
    """This process's part of one of the model's tensors: contiguous elements of the flattened tensor.

    Attributes:
        names: the tensor's names in the unwrapped model; several if it is tied.
        shape: shape of the whole tensor.
        start: where the slice begins in the flattened tensor.
        tensors: by key, 1-D views of the slice's length: {"weight": ...}, or those of the optimizer's state.
        is_copy: another process holds the same slice and writes it.
    """

    names: tuple[str, ...]
    shape: torch.Size
    start: int
    tensors: dict[str, Tensor]
    is_copy: bool


@dataclass(frozen=True)
class Update:
    """The end of an optimizer step, the same on all processes.

    Attributes:
        outcome: "stepped"; "overflowed": left out because the gradient, scaled for fp16, overflowed, and the scale was
            lowered; "skipped": left out because the loss or its gradient was not finite; "empty": left out because no
            process had a token to learn.
        grad_norm: global, before clipping.
        loss_scale: the factor of the gradients in this step; None if they are not scaled.
    """

    outcome: Literal["stepped", "overflowed", "skipped", "empty"]
    grad_norm: float
    loss_scale: float | None


class Engine:
    """One process, or a replica of the model in each.

    Attributes, after `adopt` or `prepare`:
        model: the model itself, without wrappers.
        wrapped: the module that runs the forward pass.
        optimizer: not wrapped.
        groups: names of the parameters of each of the optimizer's groups.
        trained: whether a parameter is trained, by name, tied ones too.
        scaling: the scaling of the loss in fp16; None if gradients are not scaled.
    """

    name = "one process"
    flattens = False
    """Whether it cuts flattened parameters anywhere, so that no process holds a whole matrix of an update."""
    fills_shards = False
    """Whether it shards a model on the meta device, whose values are set afterwards (`--init sharded`)."""
    shards_weights = False
    """Whether a process holds only slices of the weights."""
    autocasts = True
    """Whether autocast lowers the precision, and not a copy of the weights."""
    whole_gradients: torch.dtype | None = None
    """The dtype in which a process adds up whole gradients between accumulated batches; None where it adds up its
    slices alone."""

    def __init__(self, accelerator: Accelerator | None = None):
        self.accelerator = accelerator

    def launch(self) -> Launch:
        """How the model is divided among the processes, as the planner reads it from a launch file."""
        return self._launch(STRATEGIES["ddp"], 1)

    def _launch(self, strategy: Strategy, parts: int, checkpointing: bool = False) -> Launch:
        accelerator = self.accelerator
        return Launch(
            strategy,
            accelerator.num_processes,
            parts,
            accelerator.mixed_precision,
            checkpointing,
            on_cpu=accelerator.device.type == "cpu",
        )

    def adopt(self, model: PreTrainedModel, optimizer: LevelClock) -> "Engine":
        """Take model and optimizer as they are, without wrapping them."""
        self.model = self.wrapped = model
        self.optimizer = optimizer
        self.scaling: LossScaling | None = None
        # Read now: wrappers replace the class.
        self._model_class = type(model)
        self.trained = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self.trained[name] = parameter.requires_grad
        # Modules stay the same objects, whatever is wrapped around them; buffers may be replaced.
        self._modules = dict(model.named_modules())
        names = {parameter: name for name, parameter in model.named_parameters()}
        self.groups = []
        for group in optimizer.param_groups:
            self.groups.append([names[parameter] for parameter in group["params"]])
        return self

    def prepare(self, model: PreTrainedModel, optimizer: LevelClock) -> nn.Module:
        """Wrap both for training; returns the module that runs the forward pass."""
        self.adopt(model, optimizer)
        for group in optimizer.param_groups:
            rule = group["optimizer"]
            if self.flattens and RULES[rule].needs_matrices:
                raise ValueError(
                    f"The optimizer {rule} needs whole matrices and {self.name} cuts them anywhere: launch with "
                    "accelerate_configs/fsdp2.yaml or ddp.yaml, or use adamw (--optimizer, --level_optimizers)."
                )
        self.wrapped, self._stepper = self.accelerator.prepare(model, optimizer)
        if self.accelerator.scaler is not None:
            self.scaling = TorchScaling(self.accelerator.scaler)
        return self.wrapped

    def weights_loaded(self) -> None:
        """Called after the tensors of `weight_slices` were set."""

    def loss_scale(self, valid_tokens: float) -> float:
        """The factor of a summed loss that makes gradients those of its mean over all processes' tokens.

        Engines average gradients over processes, and `accelerate` divides by the accumulated batches: undone here.
        """
        return self.accelerator.num_processes * self.accelerator.gradient_accumulation_steps / max(valid_tokens, 1)

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of one batch of the step."""
        self.accelerator.backward(loss)

    def update(self, loss: float, max_grad_norm: float, valid_tokens: float) -> Update:
        """End the step after its last batch: clip, then change the weights or leave the step out.

        `loss` and `valid_tokens`: the step's, over all processes. These and the norm are the same on all, so all step
        or none does.
        """
        grad_norm = self._clip(max_grad_norm)
        scale = None if self.scaling is None else self.scaling.scale
        if not valid_tokens:
            # Decay and momentum would change the weights.
            outcome = "empty"
            self._skip(lower_scale=False)
        elif math.isfinite(loss) and math.isfinite(grad_norm):
            outcome = "stepped"
            self._step()
        else:
            overflowed = math.isfinite(loss) and self.scaling is not None and self.scaling.can_fall
            outcome = "overflowed" if overflowed else "skipped"
            self._skip(lower_scale=overflowed)
        return Update(outcome, grad_norm, scale)

    def _clip(self, max_norm: float) -> float:
        """Clip the global gradient norm after the step's last batch; returns it, the same on all processes."""
        norm = self.accelerator.clip_grad_norm_(self.wrapped.parameters(), max_norm or math.inf)
        return float(self._gathered(norm))

    def _step(self) -> None:
        """Update the weights and clear the gradients."""
        if self.scaling is None:
            self._stepper.step()
        else:
            # Not through the stepper, which briefly replaces `step`: the scheduler watches that method.
            self.scaling.step(self.optimizer)
        self._stepper.zero_grad()

    def _skip(self, lower_scale: bool) -> None:
        """Clear the gradients; `lower_scale`: because they overflowed at the loss's scale."""
        if self.scaling is not None:
            self.scaling.skip(lower_scale)
        self._stepper.zero_grad()

    def gradient_norm(self, parameters: list[nn.Parameter]) -> float | None:
        """Norm of the gradients of some of the model's parameters, between backward and `update`; None without any."""
        norm = self._scaled_norm(parameters)
        return norm if norm is None or self.scaling is None else norm / self.scaling.scale

    @torch.no_grad()
    def _scaled_norm(self, parameters: list[nn.Parameter]) -> float | None:
        """Norm of the gradients in memory; in fp16 it includes the scale of the loss."""
        norms = []
        for parameter in parameters:
            if parameter.grad is not None:
                norms.append(self._gathered(torch.linalg.vector_norm(parameter.grad.float())))
        return float(torch.linalg.vector_norm(torch.stack(norms))) if norms else None

    def local_weights(self) -> list[Tensor]:
        """The weights in this process's memory, including an optimizer's own copy of them."""
        return list(self.model.parameters())

    def local_gradients(self) -> list[Tensor]:
        """The gradients that are in this process's memory now."""
        return [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]

    def _gathered(self, norm: Tensor) -> Tensor:
        """The norm over all processes' parts of a gradient."""
        return norm

    def buffers(self) -> dict[str, Tensor]:
        """The model's buffers by name, those outside the state dict too; every process has all of them."""
        buffers = {}
        for prefix, module in self._modules.items():
            for key, buffer in module._buffers.items():
                if buffer is not None:
                    buffers[f"{prefix}.{key}".lstrip(".")] = buffer
        return buffers

    def compute_dtype(self) -> str | None:
        """Name of the dtype in which parameters compute; None: their own."""
        low = LOW_PRECISION.get(self.accelerator.mixed_precision)
        if low is None:
            return None
        return f"{dtype_name(low)} (autocast)" if self.autocasts else dtype_name(low)

    def buffer_dtype(self) -> torch.dtype | None:
        """The dtype in which buffers of fractions compute; None: their own."""
        return None

    def reduce_dtype(self, name: str) -> torch.dtype | None:
        """The dtype in which the gradient of a parameter is summed over processes; None if it is not."""
        return None if self.accelerator.num_processes == 1 else self.model.get_parameter(name).dtype

    def weight_slices(self) -> Iterator[Slice]:
        """This process's slices of the state dict: the same weights in the same order on all processes."""
        tied: dict[Tensor, list[str]] = {}
        for name, tensor in self._state():
            tied.setdefault(tensor, []).append(name)
        for tensor, names in tied.items():
            yield self._slice(tuple(names), tensor, {"weight": tensor.detach()})

    def _state(self) -> list[tuple[str, Tensor]]:
        # The parameters themselves and not copies: tied ones are the same object.
        return list(self.model.state_dict(keep_vars=True).items())

    def _slice(self, names: tuple[str, ...], tensor: Tensor, values: dict[str, Tensor]) -> Slice:
        """This process's slice of a tensor; `values`: its weight or optimizer state, as the engine has it."""
        flat = {key: value.view(-1) for key, value in values.items()}
        return Slice(names, tensor.shape, start=0, tensors=flat, is_copy=not PartialState().is_main_process)

    @cached_property
    def part_group(self) -> distributed.ProcessGroup | None:
        """A second process group, for threads that send parts of weights while the training communicates.

        All processes must make it together, at the first access. None if the first process has all weights.
        """
        if not self.shards_weights:
            return None
        return distributed.new_group(backend="gloo", timeout=self.accelerator.init_handler.timeout)

    def saves_parts(self, save_sharded: bool) -> bool:
        """Whether every process saves its own part of the weights, as `--save_sharded` asks."""
        return save_sharded and self.shards_weights

    def save_model(self, folder: Path, weights: dict[str, Tensor], **options) -> None:
        """`save_pretrained` with the whole `weights`, on the first process; the config names their dtype."""
        self.model.save_pretrained(folder, state_dict=weights, **options)
        share_weights(folder)

    def readable_model(self, folder: Path) -> PreTrainedModel:
        """A model that one process can run alone; if the weights are sharded, the one just saved to `folder`."""
        return self._model_class.from_pretrained(folder) if self.shards_weights else self.model

    def optimizer_slices(self) -> Iterator[tuple[Slice, dict[str, Tensor]]]:
        """This process's slices of the optimizer's state, and each parameter's scalars; created if there are none."""
        self.optimizer.create_states()
        for names, group in zip(self.groups, self.optimizer.param_groups, strict=True):
            for name, parameter in zip(names, group["params"], strict=True):
                tensors, scalars = split_state(self.optimizer.state[parameter])
                yield self._slice((name,), parameter, tensors), scalars


def dtype_name(dtype: torch.dtype) -> str:
    """The name without its module, such as "float32"."""
    return str(dtype).removeprefix("torch.")


def split_state(state: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The tensors shaped as the parameter, and the scalars."""
    tensors, scalars = {}, {}
    for key, value in state.items():
        kind = tensors if value.ndim else scalars
        kind[key] = value
    return tensors, scalars


def is_on_meta(model: nn.Module) -> bool:
    """Whether any parameter of a model has no values."""
    return any(parameter.is_meta for parameter in model.parameters())


def like(parameter: nn.Parameter, device: torch.device | str, dtype: torch.dtype | None = None) -> nn.Parameter:
    """A parameter of this shape without its values, with the marks that families put on parameters."""
    other = nn.Parameter(
        torch.empty_like(parameter, device=device, dtype=dtype), requires_grad=parameter.requires_grad
    )
    other.__dict__.update(parameter.__dict__)
    return other


def make_real(parameter: nn.Parameter, device: torch.device, dtype: torch.dtype | None = None) -> None:
    """Give a parameter memory, without values. It stays the same object: tied weights and optimizers refer to it."""
    torch.utils.swap_tensors(parameter, like(parameter, device, dtype))
