"""DeepSpeed's ZeRO: stage 2 shards gradients and optimizer state, stage 3 the parameters as well.

DeepSpeed is imported inside functions: it is an extra.
"""

import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from hope_hf.common.launch_file import MICRO_BATCH, deepspeed_json
from hope_hf.common.precision import LOW_PRECISION
from hope_hf.common.process import warn_once
from hope_hf.optim import LevelClock
from hope_hf.plan import Launch, zero_strategy

from .base import Engine, EngineOptions, Slice, dtype_name, is_on_meta, make_real, split_state
from .loss_scaling import DeepSpeedScaling

# DeepSpeed's names of settings that the flags decide.
FLAGS_OF_KEYS = {
    MICRO_BATCH: "per_device_train_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "max_grad_norm",
}


@dataclass(frozen=True)
class _FlatSlice:
    """A process's slice of a parameter in fp32: it begins at `start` of the parameter, and at `offset` of `flat`."""

    parameter: Tensor
    start: int
    flat: Tensor
    offset: int
    length: int
    group: dict
    """The optimizer's group of the parameter."""

    def slice(self, names: tuple[str, ...], flat: dict[str, Tensor]) -> Slice:
        """The slices of the tensors `flat`, which have the layout of `self.flat`."""
        values = {}
        for key, tensor in flat.items():
            values[key] = tensor.narrow(0, self.offset, self.length)
        # Stage 3 empties the parameter itself.
        shape = getattr(self.parameter, "ds_shape", self.parameter.shape)
        return Slice(names, shape, self.start, values, is_copy=False)


class Zero(Engine):
    """Stages 2 and 3. DeepSpeed flattens parameters, so that no process holds whole matrices of an update."""

    flattens = True

    def __init__(self, accelerator: Accelerator, options: EngineOptions):
        """Raises ValueError if the DeepSpeed file contradicts a flag."""
        super().__init__(accelerator)
        # DeepSpeed calls deprecated functions of torch in every step; its user cannot change that.
        warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
        # While this config is set, transformers shards models as it makes them: initial values differ, and a process
        # that loads a model alone waits forever. Here --init decides how models are made.
        unset_hf_deepspeed_config()
        if os.environ.get("ACCELERATE_DEEPSPEED_ZERO3_INIT", "false").lower() == "true":
            warn_once(f"zero3_init_flag is ignored: --init {options.init} decides.")
        config = accelerator.state.deepspeed_plugin.deepspeed_config
        self._options = config["zero_optimization"]
        self.stage = self._options["stage"]
        if self.stage not in (2, 3):
            raise ValueError(f"DeepSpeed's zero_stage is {self.stage}: use 2 or 3, or accelerate_configs/ddp.yaml.")
        self.name = f"DeepSpeed ZeRO-{self.stage}"
        self.fills_shards = self.stage == 3
        _check_file(options)
        # With offloading this package's optimizer runs on the CPU, not one of DeepSpeed's.
        config["zero_force_ds_cpu_optimizer"] = False
        for key, flag in FLAGS_OF_KEYS.items():
            config[key] = getattr(options, flag)
        accelerator.gradient_accumulation_steps = options.gradient_accumulation_steps
        if accelerator.mixed_precision == "bf16" and not deepspeed_json().get("bf16"):
            # Weights stay fp32 and memories compute in it, as under the other engines.
            config["bf16"] = {"enabled": False}
            config["torch_autocast"] = {"enabled": True, "dtype": "bfloat16"}
        autocast = config.get("torch_autocast", {})
        self._autocast = autocast.get("dtype") if autocast.get("enabled") else None
        # DeepSpeed's own fp16: forward weights in fp16, the optimizer's in fp32. With torch's autocast it would clip
        # gradients that are still scaled, and each process would detect only its own overflow.
        low_precision = [name for name in LOW_PRECISION if config.get(name, {}).get("enabled") is True]
        self._low_precision = bool(low_precision)
        # In low precision DeepSpeed shards its fp32 weights.
        self.shards_weights = self.stage == 3 or self._low_precision

    def launch(self) -> Launch:
        strategy = zero_strategy(self.stage, self._offloads("optimizer"), self._offloads("param"))
        return self._launch(strategy, self.accelerator.num_processes)

    def _offloads(self, what: str) -> bool:
        return (self._options.get(f"offload_{what}") or {}).get("device") == "cpu"

    def prepare(self, model: PreTrainedModel, optimizer: LevelClock) -> nn.Module:
        if self.stage == 3:
            self._gather_whole_blocks(model)
        exact = {}
        if is_on_meta(model):
            self._make_parts_real(model)
        elif self._low_precision:
            for name, parameter in model.named_parameters():
                exact[name] = parameter.detach().clone()
        super().prepare(model, optimizer)
        assert self.wrapped.zero_optimization_stage() == self.stage
        assert self.wrapped.gradient_accumulation_steps() == self.accelerator.gradient_accumulation_steps
        self._zero = self.wrapped.optimizer
        self._names = {parameter: name for name, parameter in model.named_parameters()}
        if self.accelerator.mixed_precision == "fp16":
            self.scaling = DeepSpeedScaling(self._zero.loss_scaler)
        if exact:
            self._keep_exact(exact)
        return self.wrapped

    @torch.no_grad()
    def _make_parts_real(self, model: PreTrainedModel):
        """Cut a model on the meta device, parameter by parameter: DeepSpeed would first move all of it."""
        from deepspeed import zero

        low = LOW_PRECISION[self.accelerator.mixed_precision] if self._low_precision else None
        offload = self._options.get("offload_param") or {}
        for parameter in model.parameters():
            make_real(parameter, self.accelerator.device, low)
            zero.Init(
                nn.ParameterList([parameter]),
                mem_efficient_linear=self._options.get("memory_efficient_linear", True),
                remote_device=offload.get("device"),
                pin_memory=offload.get("pin_memory", False),
                dtype=parameter.dtype,
            )
        for module in model.modules():
            for key, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[key] = buffer.to(self.accelerator.device)

    def weights_loaded(self) -> None:
        # The forward pass has its own copy, which DeepSpeed sets in every step.
        for group in range(len(self._zero.fp32_partitioned_groups_flat)):
            self._zero._reassign_or_swap_out_partitioned_parameters(group)

    @torch.no_grad()
    def _keep_exact(self, weights: dict[str, Tensor]):
        """Copy the exact weights to the optimizer; DeepSpeed rounded them before it copied them."""
        for part in self._flat_slices():
            whole = weights[self._names[part.parameter]].flatten()
            values = part.flat.narrow(0, part.offset, part.length)
            values.copy_(whole[part.start : part.start + part.length])

    @staticmethod
    def _gather_whole_blocks(model: PreTrainedModel):
        """Gather blocks as a whole: the mixer uses memories outside the forward pass of their own module."""
        from deepspeed.utils import set_z3_leaf_modules

        blocks = model._no_split_modules or ()
        classes = {type(module) for module in model.modules() if type(module).__name__ in blocks}
        if classes:
            set_z3_leaf_modules(model, list(classes))

    def backward(self, loss: Tensor) -> None:
        # accelerate would also take the step here, before it is known whether to skip it.
        self.wrapped.set_gradient_accumulation_boundary(is_boundary=self.accelerator.sync_gradients)
        self.wrapped.backward(loss)

    def _clip(self, max_norm: float) -> float:
        """Returns the norm; DeepSpeed clips within its step, to the `--max_grad_norm` in its config."""
        from deepspeed.runtime.utils import combine_grad_norm_groups, is_invalid_grad_norm

        groups = self._zero._get_norm_groups() if self.stage == 3 else None
        norm = combine_grad_norm_groups(groups) if groups is not None else self._zero.scaled_global_norm()
        # DeepSpeed returns -1 for a norm that is not finite.
        return float("nan") if is_invalid_grad_norm(norm) else float(norm) / self._zero.loss_scale

    def _step(self) -> None:
        self.wrapped.step()

    def _skip(self, lower_scale: bool) -> None:
        scaling = None if lower_scale or self.scaling is None else self.scaling.state()
        # DeepSpeed frees its gradients and advances its counters only in a step: take one that changes nothing.
        step, self.optimizer.step = self.optimizer.step, lambda *arguments, **keywords: None
        try:
            self.wrapped.step()
        finally:
            self.optimizer.step = step
        if scaling is not None:
            # DeepSpeed treats every non-finite gradient as an overflow, whatever its cause.
            self.scaling.load(scaling)

    @torch.no_grad()
    def _scaled_norm(self, parameters: list[nn.Parameter]) -> float | None:
        from deepspeed.utils import safe_get_full_grad

        if not parameters:
            return None
        norms = []
        for parameter in parameters:
            norms.append(torch.linalg.vector_norm(safe_get_full_grad(parameter).float()))
        return float(torch.linalg.vector_norm(torch.stack(norms)))

    def local_weights(self) -> list[Tensor]:
        return super().local_weights() + [part.flat for part in self._flat_slices()]

    def local_gradients(self) -> list[Tensor]:
        # DeepSpeed keeps gradients of its own; those offloaded to the CPU belong to its flat weights.
        gradients = [part.flat.grad for part in self._flat_slices()]
        if self.stage == 3:
            gradients.append(self._zero.grad_partitions_flat_buffer)
        else:
            for group in self._zero.averaged_gradients.values():
                gradients += group or []
        return super().local_gradients() + [gradient for gradient in gradients if gradient is not None]

    def compute_dtype(self) -> str | None:
        if self._low_precision:
            return dtype_name(LOW_PRECISION[self.accelerator.mixed_precision])
        return self._autocast and f"{self._autocast} (autocast)"

    def reduce_dtype(self, name: str) -> torch.dtype:
        return self._zero.get_param_comm_dtype(self.model.get_parameter(name))

    def weight_slices(self) -> Iterator[Slice]:
        # Only DeepSpeed's groups map parameters to their slices.
        self._slices = {part.parameter: part for part in self._flat_slices()}
        return super().weight_slices()

    def _slice(self, names: tuple[str, ...], tensor: Tensor, values: dict[str, Tensor]) -> Slice:
        if not self.shards_weights or not isinstance(tensor, nn.Parameter):
            return super()._slice(names, tensor, values)
        part = self._slices.get(tensor)
        if part is None:
            # Stage 2 cuts all parameters end to end: this process's range does not overlap with this parameter.
            return Slice(names, tensor.shape, 0, {"weight": torch.empty(0)}, is_copy=False)
        return part.slice(names, {"weight": part.flat.detach()})

    def save_model(self, folder: Path, weights: dict[str, Tensor], **options) -> None:
        super().save_model(folder, weights, **options)
        if self._low_precision:
            # The saved config has the forward pass's dtype, in which the weights would be loaded.
            self.model.config.dtype = "float32"
            self.model.config.save_pretrained(folder)

    def optimizer_slices(self) -> Iterator[tuple[Slice, dict[str, Tensor]]]:
        for part in self._flat_slices():
            tensors, scalars = split_state(self.optimizer.create_state(part.flat, part.group))
            yield part.slice((self._names[part.parameter],), tensors), scalars

    def _flat_slices(self) -> Iterator[_FlatSlice]:
        """This process's slices of all parameters of which it has any."""
        return self._flat_slices_of_stage_3() if self.stage == 3 else self._flat_slices_of_stage_2()

    def _flat_slices_of_stage_2(self) -> Iterator[_FlatSlice]:
        zero = self._zero
        for parameters, flat, group in zip(
            zero.bit16_groups, zero.single_partition_of_fp32_groups, self.optimizer.param_groups, strict=True
        ):
            for parameter in parameters:
                mapping = parameter._hp_mapping
                if mapping is not None:
                    start, fragment = mapping.lp_fragment_address.start, mapping.hp_fragment_address
                    yield _FlatSlice(parameter, start, flat, fragment.start, fragment.numel, group)

    def _flat_slices_of_stage_3(self) -> Iterator[_FlatSlice]:
        zero, groups = self._zero, self.optimizer.param_groups
        for index, flat in enumerate(zero.fp32_partitioned_groups_flat):
            for parameter in zero.fp16_groups[index]:
                _, offset, length = zero.grad_position[zero.get_param_id(parameter)]
                start = self.accelerator.process_index * length
                # The last slices are padded.
                length = max(0, min(length, parameter.ds_numel - start))
                yield _FlatSlice(parameter, start, flat, offset, length, groups[zero.sub_group_to_group_id[index]])


def _check_file(options: EngineOptions) -> None:
    configuration = deepspeed_json()
    for key, variable in (
        ("gradient_accumulation_steps", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"),
        ("gradient_clipping", "ACCELERATE_GRADIENT_CLIPPING"),
    ):
        if os.environ.get(variable, "auto") != "auto":
            configuration.setdefault(key, float(os.environ[variable]))
    for key, flag in FLAGS_OF_KEYS.items():
        value = configuration.get(key, "auto")
        if value != "auto" and value != getattr(options, flag):
            raise ValueError(
                f"The DeepSpeed configuration has {key} {value:g} and --{flag} is {getattr(options, flag):g}: leave "
                "the key out, or make it 'auto'."
            )
    for key in ("optimizer", "scheduler"):
        if key in configuration:
            raise ValueError(
                f"The DeepSpeed configuration brings {key}, and so does hope-hf train: leave the key out "
                "(--optimizer, --lr_scheduler_type)."
            )
