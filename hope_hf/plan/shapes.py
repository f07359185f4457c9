"""Names, shapes and update rules of a causal LM's parameters, and the units in which FSDP gathers them.

They are read from the model on the meta device, which holds no numbers: 0.07 s for Llama-7B.
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property

import torch
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

    def optimizer_bytes(self, optimizer: str, tokens_per_step: int) -> int:
        """Bytes of optimizer state per element: the rule's, plus a sum of gradients if its level steps less often.

        `tokens_per_step`: over all processes and accumulated batches. Frozen parameters have none.
        """
        if not self.is_trained:
            return 0
        waits = period_steps(self.period, tokens_per_step) > 1
        return RULES[self.rules[optimizer]].state_bytes + (4 if waits else 0)


@dataclass(frozen=True)
class Shapes:
    """All parameters of a model, tied ones once; `model`: on the meta device."""

    weights: tuple[Weight, ...]
    is_tied: bool
    model: PreTrainedModel | None = None

    @cached_property
    def count(self) -> int:
        """Number of parameters."""
        return sum(weight.count for weight in self.weights)

    @cached_property
    def trained(self) -> int:
        """Number of parameters that are trained."""
        return sum(weight.count for weight in self.weights if weight.is_trained)

    @cached_property
    def units(self) -> dict[int | str, int]:
        """Number of parameters of each unit that FSDP gathers at once."""
        units: dict[int | str, int] = {}
        for weight in self.weights:
            units[weight.unit] = units.get(weight.unit, 0) + weight.count
        return units

    @property
    def largest_block(self) -> int:
        """Number of parameters of the largest block."""
        return max((count for unit, count in self.units.items() if isinstance(unit, int)), default=0)

    @cached_property
    def matrices(self) -> int:
        """Number of parameters of the matrices that are multiplied, without tables that are only looked up."""
        looked_up = {ROOT} if self.is_tied else {ROOT, EMBEDDING}
        return sum(w.count for w in self.weights if len(w.shape) == 2 and w.unit not in looked_up)

    def as_trained(self, model: PreTrainedModel) -> "Shapes":
        """The shapes of a run's model: its frozen parameters are marked, and the matrices of its LoRA are added."""
        parameters = dict(model.named_parameters())
        trained = {name.replace(".base_layer.", "."): found.requires_grad for name, found in parameters.items()}
        weights = [replace(weight, is_trained=trained.get(weight.name, True)) for weight in self.weights]
        added = {name: tuple(found.shape) for name, found in parameters.items() if ".lora_" in name}
        if added:
            rules = {key: rules_of(model, key) for key in RULES}
        for name, shape in added.items():
            own = {key: found[name] for key, found in rules.items()}
            weights.append(Weight(name, shape, unit=ROOT, period=0, rules=own))
        return replace(self, weights=tuple(weights))


def shapes_of(config, trust_remote_code: bool = False) -> Shapes:
    """The shapes of the causal LM of a config. ValueError if transformers cannot build it."""
    model = meta_model(config, trust_remote_code)
    kinds = model._no_split_modules or ()
    blocks = [f"{name}." for name, module in model.named_modules() if type(module).__name__ in kinds]
    tables = [model.get_input_embeddings(), model.get_output_embeddings()]
    table, head = (None if module is None else module.weight for module in tables)

    def unit(name: str, parameter) -> int | str:
        for index, prefix in enumerate(blocks):
            if name.startswith(prefix):
                return index
        if parameter is table and table is not head:
            return EMBEDDING
        # Vectors outside the blocks belong to the last norm.
        return TAIL if parameter is head or parameter.ndim == 1 else ROOT

    periods, rules = periods_of(model), {name: rules_of(model, name) for name in RULES}
    weights = (
        Weight(name, tuple(p.shape), unit(name, p), periods[name], {key: found[name] for key, found in rules.items()})
        for name, p in model.named_parameters()
    )
    return Shapes(tuple(weights), table is head, model)


def meta_model(config, trust_remote_code: bool = False) -> PreTrainedModel:
    """The causal LM of a config on the meta device; ValueError if transformers cannot build it."""
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    except MISTAKES as error:
        raise ValueError(f"--model_type {config.model_type} cannot be built: {one_line(error)}") from error
