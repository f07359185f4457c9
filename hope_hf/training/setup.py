"""Data, model, optimizer and plan of a run, built and checked before anything is written."""

from dataclasses import dataclass

from accelerate import Accelerator
from transformers import PreTrainedModel

import hope_hf
from hope_hf.data import DataConfig, build_data
from hope_hf.optim import LevelClock, build_optimizer

from .arguments import Arguments
from .model import build_config, build_model, is_hope

LONGEST_DEFAULT_BLOCK = 1024
MOST_WARM_UP_STEPS = 1000


@dataclass(frozen=True)
class Plan:
    """How long the run is."""

    block_size: int
    """Tokens per row."""
    tokens_per_step: int
    """Over all processes and accumulated batches."""
    total_steps: int
    warmup_steps: int

    @property
    def total_tokens(self) -> int:
        return self.total_steps * self.tokens_per_step


@dataclass
class Run:
    """The parts of a run, none of them wrapped."""

    data: object
    model: PreTrainedModel
    optimizer: LevelClock
    plan: Plan


def build_all(args: Arguments, accelerator: Accelerator, data_state: dict | None) -> Run:
    """Everything the loop needs; `data_state` continues the data after the batch it was saved with.

    Raises ValueError with one sentence that names the flag or file.
    """
    # One process prepares what the others then find in the cache.
    with accelerator.local_main_process_first():
        data = build_data(
            data_config(args), rank=accelerator.process_index, world_size=accelerator.num_processes, state=data_state
        )
    config = build_config(args, data.tokenizer, hope_hf.PRESETS)
    model = build_model(args, config, data.tokenizer)
    _check_carry(args, config)
    tokens_per_step = (
        args.per_device_train_batch_size
        * data.block_size
        * args.gradient_accumulation_steps
        * accelerator.num_processes
    )
    total_steps = args.max_train_steps
    optimizer = build_optimizer(
        model,
        args.optimizer,
        learning_rate=args.learning_rate,
        weight_decay=args.weight_decay,
        betas=(args.adam_beta1, args.adam_beta2),
        eps=args.adam_epsilon,
        tokens_per_step=tokens_per_step,
        level_optimizers=args.level_optimizers,
    )
    warmup = args.num_warmup_steps
    if warmup is None:
        warmup = min(total_steps // 10, MOST_WARM_UP_STEPS)
    return Run(data, model, optimizer, Plan(data.block_size, tokens_per_step, total_steps, warmup))


def data_config(args: Arguments) -> DataConfig:
    """The part of the flags that the data need."""
    return DataConfig(
    )


def _check_carry(args: Arguments, config):
    if args.document_boundary != "carry":
        return
    if not is_hope(config) or config.mixer == "attention":
        kind = "attention mixer" if is_hope(config) else config.model_type
        raise ValueError(
            f"--document_boundary carry hands memories over, and the {kind} has none: use --document_boundary reset."
        )
