"""Names, shapes and update rules of a causal LM's parameters, and the units in which FSDP gathers them.

They are read from the model on the meta device, which holds no numbers: 0.07 s for Llama-7B.
"""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from hope_hf.common.process import MISTAKES, one_line
from hope_hf.optim import RULES, period_steps, periods_of, rules_of

# Where a parameter belongs outside the blocks. The tail (last norm, head and a tied embedding) is gathered as one.
EMBEDDING, TAIL, ROOT = "embedding", "tail", "root"


@dataclass(frozen=True)
class Weight:
    """One parameter.

    Attributes:
        name: as in the model.
        shape: of the whole parameter.
        unit: the number of its block, or `EMBEDDING`, `TAIL` or `ROOT`.
        period: tokens between two updates of its level; 0 for a parameter of no level.
        rules: value of `--optimizer` -> the rule that updates the parameter.
        is_trained: whether it has a gradient and a state of the optimizer.
    """

    name: str
    shape: tuple[int, ...]
    unit: int | str
    period: int
    rules: dict[str, str]
    is_trained: bool = True

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    @property
    def is_in_block(self) -> bool:
        return self.unit not in (EMBEDDING, TAIL, ROOT)

    def optimizer_bytes(self, optimizer: str, tokens_per_step: int) -> int:
        """Bytes of optimizer state per element: the rule's, plus a sum of gradients if its level steps less often.

        `tokens_per_step`: over all processes and accumulated batches. Frozen parameters have none.
        """
        if not self.is_trained:
            return 0
        num_tensors = len(RULES[self.rules[optimizer]].state_names)
        if period_steps(self.period, tokens_per_step) > 1:
            num_tensors += 1
        return 4 * num_tensors


@dataclass(frozen=True)
class Shapes:
    """All parameters of a model, tied ones once; `model`: on the meta device.

    `buffers`: bytes of those that are saved with the weights; every process has all.
    """

    weights: tuple[Weight, ...]
    is_tied: bool
    model: PreTrainedModel | None = None
    buffers: int = 0

    @cached_property
    def traced(self) -> dict:
        """What `parts.py` has traced of the model (`Batches`), by mode and by what is recomputed."""
        return {}

    @cached_property
    def untraceable(self) -> set:
        """The modes in which the model does not run on fake tensors."""
        return set()

    @cached_property
    def count(self) -> int:
        """Number of parameters."""
        return sum(weight.count for weight in self.weights)

    @cached_property
    def trained(self) -> int:
        """Number of parameters that are trained."""
        return sum(weight.count for weight in self.weights if weight.is_trained)

    @cached_property
    def units(self) -> Counter:
        """Number of parameters of each unit that FSDP gathers at once."""
        units = Counter()
        for weight in self.weights:
            units[weight.unit] += weight.count
        return units

    @property
    def largest_block(self) -> int:
        """Number of parameters of the largest block."""
        in_blocks = {weight.unit for weight in self.weights if weight.is_in_block}
        return max(map(self.units.get, in_blocks), default=0)

    @cached_property
    def matrices(self) -> int:
        """Number of parameters of the matrices that are multiplied, without tables that are only looked up."""
        looked_up = (ROOT,) if self.is_tied else (ROOT, EMBEDDING)
        count = 0
        for weight in self.weights:
            if len(weight.shape) == 2 and weight.unit not in looked_up:
                count += weight.count
        return count

    def optimizer_bytes(self, optimizer: str, tokens_per_step: int) -> int:
        """Bytes of the optimizer's state of the whole model."""
        size = 0
        for weight in self.weights:
            size += weight.count * weight.optimizer_bytes(optimizer, tokens_per_step)
        return size

    def as_trained(self, model: PreTrainedModel) -> "Shapes":
        """The shapes of a run's model: its frozen parameters are marked, and the matrices of its LoRA are added."""
        parameters = dict(model.named_parameters())
        is_trained = {}
        for name, parameter in parameters.items():
            is_trained[name.replace(".base_layer.", ".")] = parameter.requires_grad
        weights = []
        for weight in self.weights:
            weights.append(replace(weight, is_trained=is_trained.get(weight.name, True)))
        of_lora = [name for name in parameters if ".lora_" in name]
        rules = _rules_by_parameter(model) if of_lora else {}
        for name in of_lora:
            shape = tuple(parameters[name].shape)
            weights.append(Weight(name, shape, unit=ROOT, period=0, rules=rules[name]))
        return replace(self, weights=tuple(weights))


def shapes_of(config, trust_remote_code: bool = False) -> Shapes:
    """The shapes of the causal LM of a config. ValueError if transformers cannot build it."""
    model = meta_model(config, trust_remote_code)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    table = None if embedding is None else embedding.weight
    output = None if head is None else head.weight
    block_of = {}
    for index, block in enumerate(blocks_of(model)):
        block_of |= dict.fromkeys(block.parameters(), index)
    periods, rules = periods_of(model), _rules_by_parameter(model)
    weights = []
    for name, parameter in model.named_parameters():
        if parameter in block_of:
            unit = block_of[parameter]
        elif parameter is table and table is not output:
            unit = EMBEDDING
        else:
            # Vectors outside the blocks belong to the last norm.
            is_in_tail = parameter is output or parameter.ndim == 1
            unit = TAIL if is_in_tail else ROOT
        shape = tuple(parameter.shape)
        weights.append(Weight(name, shape, unit, periods[name], rules[name]))
    saved = model.state_dict()
    buffers = 0
    for name, buffer in model.named_buffers():
        if name in saved:
            buffers += buffer.nbytes
    return Shapes(tuple(weights), is_tied=table is output, model=model, buffers=buffers)


def shard_bytes(weights: Iterable[Weight], parts: int, by_rows: bool, each=lambda weight: 4) -> int:
    """Bytes of the largest part of some parameters; `each`: bytes per element of a parameter."""
    total = 0
    for weight in weights:
        count = weight.count
        if by_rows:
            rows = weight.shape[0]
            count = count // rows * largest_part(rows, parts)
        total += count * each(weight)
    return total if by_rows else largest_part(total, parts)


def largest_part(whole: int, parts: int) -> int:
    """`whole / parts`, rounded up."""
    return -(-whole // parts)


def blocks_of(model: PreTrainedModel) -> list[nn.Module]:
    """A causal LM's blocks; FSDP derives their classes from the architecture's."""
    names = set(model._no_split_modules or ())
    blocks = []
    for module in model.modules():
        if any(kind.__name__ in names for kind in type(module).__mro__):
            blocks.append(module)
    return blocks


def _rules_by_parameter(model: PreTrainedModel) -> dict[str, dict[str, str]]:
    """By name of a parameter, value of `--optimizer` -> the rule that updates it."""
    rules: dict[str, dict[str, str]] = {}
    for optimizer in RULES:
        for name, rule in rules_of(model, optimizer).items():
            rules.setdefault(name, {})[optimizer] = rule
    return rules


def meta_model(config, trust_remote_code: bool = False) -> PreTrainedModel:
    """The causal LM of a config on the meta device; ValueError if transformers cannot build it."""
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    except MISTAKES as error:
        raise ValueError(f"--model_type {config.model_type} cannot be built: {one_line(error)}") from error
