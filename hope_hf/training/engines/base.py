"""What the trainer asks of the way in which processes share a model. Here: one process, or whole replicas (DDP).

Sharding engines derive from `Engine` (`fsdp2.py`, `fsdp1.py`, `zero.py`); the launcher's environment decides which
one runs, and each makes sure that it is the one asked for. All methods are called by all processes.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from accelerate import Accelerator, PartialState
from torch import Tensor, distributed, nn
from transformers import PreTrainedModel

from hope_hf.optim import LevelClock

from .loss_scaling import LossScaling, TorchScaling

LOW_PRECISION = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""By accelerate's name of a mixed precision."""


@dataclass(frozen=True)
class Shard:
    """A process's part of the optimizer's state of one parameter.

    Attributes:
        name: of the parameter, in the model as it was before it was wrapped.
        start: where the part begins in the flattened parameter.
        numel: elements of the whole parameter.
        tensors: by key, 1-D views of the state itself, all of the part's length.
        scalars: by key, the state's tensors without axes.
        is_copy: another process holds the same part and writes it.
    """

    name: str
    start: int
    numel: int
    tensors: dict[str, Tensor]
    scalars: dict[str, Tensor]
    is_copy: bool


@dataclass(frozen=True)
class Part:
    """What a process holds of one of the model's weights or buffers: contiguous elements of it.

    Attributes:
        names: in the model as it was before it was wrapped; several where it is tied.
        shape: of the whole.
        start: where the part begins in the flattened whole; None where it is not shared out.
        values: the part, 1-D; shaped as the whole where it is not shared out.
        is_copy: another process holds the same part and writes it.
    """

    names: tuple[str, ...]
    shape: torch.Size
    start: int | None
    values: Tensor
    is_copy: bool


class Engine:
    """One process, or a replica of the model in each.

    Attributes, after `adopt` or `prepare`:
        model: the model itself, whatever was wrapped around it.
        wrapped: what runs the forward pass.
        optimizer: not wrapped.
        groups: names of the parameters of each of the optimizer's groups.
        scaling: of the loss in fp16; None where gradients are not scaled.
    """

    name = "whole model in each process"
    flattens = False
    """Whether it cuts parameters without regard to their axes, so that no process ever holds a matrix of an update."""
    shards_weights = False
    """Whether a process holds a part of the weights only."""

    def __init__(self, accelerator: Accelerator | None = None):
        self.accelerator = accelerator

    def adopt(self, model: PreTrainedModel, optimizer: LevelClock) -> "Engine":
        """Take model and optimizer as they are, without wrapping them."""
        self.model = self.wrapped = model
        self.optimizer = optimizer
        self.scaling: LossScaling | None = None
        # Wrappers put classes of their own before it.
        self._model_class = type(model)
        names = {parameter: name for name, parameter in model.named_parameters()}
        self.groups = [[names[parameter] for parameter in group["params"]] for group in optimizer.param_groups]
        return self

    def prepare(self, model: PreTrainedModel, optimizer: LevelClock) -> nn.Module:
        """Wrap both for training; returns what runs the forward pass."""
        self.adopt(model, optimizer)
        if self.flattens and any(group["optimizer"] == "muon" for group in optimizer.param_groups):
            raise ValueError(
                f"Muon needs whole matrices and {self.name} cuts them anywhere: launch with "
                "accelerate_configs/fsdp2.yaml or ddp.yaml, or use AdamW (--optimizer, --level_optimizers)."
            )
        self.wrapped, self._stepper = self.accelerator.prepare(model, optimizer)
        if self.accelerator.scaler is not None:
            self.scaling = TorchScaling(self.accelerator.scaler)
        return self.wrapped

    def loss_scale(self, valid_tokens: float) -> float:
        """By what to multiply a summed loss, so that gradients are those of its mean over all processes' tokens.

        Engines average gradients over processes, and `accelerate` divides by the accumulated batches: both undone.
        """
        return self.accelerator.num_processes * self.accelerator.gradient_accumulation_steps / max(valid_tokens, 1)

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of one batch of the step."""
        self.accelerator.backward(loss)

    def clip(self, max_norm: float) -> float:
        """Clip the global gradient norm after the step's last batch; returns it, the same on all processes."""
        norm = self.accelerator.clip_grad_norm_(self.wrapped.parameters(), max_norm or math.inf)
        return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)

    def step(self) -> None:
        """Change the weights, forget the gradients."""
        if self.scaling is None:
            self._stepper.step()
        else:
            # What the stepper would do, which for a moment takes `step` away from the scheduler that watches it.
            self.scaling.step(self.optimizer)
        self._stepper.zero_grad()

    def skip(self, lower_scale: bool = False) -> None:
        """Forget the gradients, after `clip`; `lower_scale`: because of the loss's scale, which shall fall."""
        if self.scaling is not None:
            self.scaling.skip(lower_scale)
        self._stepper.zero_grad()

    def gradient_norm(self, parameters: list[nn.Parameter]) -> float | None:
        """Norm of the gradients of some of the model's parameters, between backward and `clip`; None without any."""
        norm = self._scaled_norm(parameters)
        return norm if norm is None or self.scaling is None else norm / self.scaling.scale

    @torch.no_grad()
    def _scaled_norm(self, parameters: list[nn.Parameter]) -> float | None:
        """Of the gradients as they are, in fp16 times the loss's scale."""
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if not gradients:
            return None
        norms = [torch.linalg.vector_norm(gradient.float()) for gradient in gradients]
        return float(torch.linalg.vector_norm(torch.stack([self._gathered(norm) for norm in norms])))

    def held_weights(self) -> list[Tensor]:
        """What of the weights lies in this process's memory, an optimizer's own copy of them included."""
        return list(self.model.parameters())

    def held_gradients(self) -> list[Tensor]:
        """The same of the gradients, as it is now."""
        return [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]

    def _gathered(self, norm: Tensor) -> Tensor:
        """The norm of a whole gradient."""
        return norm

    def weight_parts(self) -> Iterator[Part]:
        """This process's part of the state dict: the same weights in the same order on all processes."""
        tied: dict[int, list[str]] = {}
        tensors = {}
        for name, tensor in self._state():
            tied.setdefault(id(tensor), []).append(name)
            tensors[id(tensor)] = tensor
        for key, names in tied.items():
            yield self._part(tuple(names), tensors[key])

    def _state(self) -> list[tuple[str, Tensor]]:
        # The parameters themselves and not copies of them, which tell what is tied.
        return list(self.model.state_dict(keep_vars=True).items())

    def _part(self, names: tuple[str, ...], tensor: Tensor) -> Part:
        return Part(names, tensor.shape, None, tensor.detach(), not PartialState().is_main_process)

    @cached_property
    def part_group(self) -> distributed.ProcessGroup | None:
        """The processes once more, for threads that send parts of weights while the training sends what it must.

        All ask for it together the first time. None where the first process has all weights itself.
        """
        if not self.shards_weights:
            return None
        return distributed.new_group(backend="gloo", timeout=self.accelerator.init_handler.timeout)

    def save_model(self, folder: Path, weights: dict[str, Tensor], **options) -> None:
        """`save_pretrained` with the whole `weights`, on the first process; the config says their dtype."""
        self.model.save_pretrained(folder, state_dict=weights, **options)

    def readable_model(self, folder: Path) -> PreTrainedModel:
        """A model that one process alone can run; where its weights are shared out, the one just saved to `folder`."""
        return self._model_class.from_pretrained(folder) if self.shards_weights else self.model

    def optimizer_shards(self) -> Iterator[Shard]:
        """This process's part of the optimizer's state, which is created where there was none yet."""
        self.optimizer.create_states()
        for names, group in zip(self.groups, self.optimizer.param_groups, strict=True):
            for name, parameter in zip(names, group["params"], strict=True):
                state = self.optimizer.state[parameter]
                yield self._shard(name, parameter, state)

    def _shard(self, name: str, parameter: Tensor, state: dict[str, Tensor]) -> Shard:
        tensors, scalars = split_state(state)
        tensors = {key: tensor.view(-1) for key, tensor in tensors.items()}
        return Shard(name, 0, parameter.numel(), tensors, scalars, not PartialState().is_main_process)


def split_state(state: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The tensors shaped as the parameter, and those without axes."""
    return {k: v for k, v in state.items() if v.ndim}, {k: v for k, v in state.items() if not v.ndim}
