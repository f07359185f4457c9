"""Data, model, optimizer and plan of a run, built and checked before anything is written."""

import math
from dataclasses import dataclass, fields, replace
from pathlib import Path

import huggingface_hub
import torch
from accelerate import Accelerator
from datasets import disable_progress_bars
from transformers import PreTrainedConfig, PreTrainedModel

import hope_hf
from hope_hf.common.adapters import add_lora, require_peft_for_training
from hope_hf.common.defaults import VOCAB_SIZE
from hope_hf.common.flags import LARGEST_VOCABULARY, ModelArguments
from hope_hf.common.models import build_config, build_model, is_hope, load_config
from hope_hf.common.overrides import named_vocabulary
from hope_hf.common.process import MISTAKES, warn_once
from hope_hf.common.recompute import recompute_activations
from hope_hf.common.recompute_flag import parse_recomputed
from hope_hf.common.run_arguments import (
    FLAGS,
    LONGEST_DEFAULT_BLOCK,
    Arguments,
    OptimizationArguments,
    check_block_size,
)
from hope_hf.data import (
    DEFAULT_VOCAB_SIZE,
    Data,
    DataConfig,
    build_data,
    warn_of_other_tokenizer,
)
from hope_hf.optim import LevelClock, build_optimizer

from .checkpoints.manifest import Manifest
from .checkpoints.reader import SavedRun, other_run
from .checkpoints.state_files import not_of_a_run, read_json
from .checkpoints.weights import load_weights
from .engines.base import Engine
from .initial import (
    DrawnValues,
    StoredValues,
    build_fake,
    build_on_meta,
    built_bytes,
    check_host_memory,
    checkpoint_values,
    pretrained_values,
)
from .process import shows_bars
from .schedule import ENDLESS, Schedule, continued, describe_change, saved_schedule, schedule_of
from .watch.profile import check_profiled

SYNTHETIC = "synthetic"
LONG_RUN = 10**6
# Hardly anything is learned in fewer steps.
FEW_STEPS = 10


@dataclass(frozen=True)
class RunPlan:
    """The length of the run."""

    block_size: int
    """Tokens per row."""
    tokens_per_step: int
    """Over all processes and accumulated batches."""
    total_steps: int
    schedule: Schedule

    def total_tokens(self, saved: SavedRun | None) -> int:
        """Tokens of the whole run; the steps of a checkpoint that it continues may have had another size."""
        if saved is None:
            return self.total_steps * self.tokens_per_step
        steps_to_come = self.total_steps - saved.step
        return saved.tokens + steps_to_come * self.tokens_per_step


@dataclass
class RunParts:
    """The parts of a run, none of them wrapped."""

    data: Data
    model: PreTrainedModel
    optimizer: LevelClock
    plan: RunPlan
    initial_values: DrawnValues | StoredValues | None
    """What fills a model on the meta device; None for others."""
    schedule_change: str | None
    """The line that says how the schedule differs from the checkpoint's, if it does."""

    def load_weights(self, manifest: Manifest) -> None:
        """Take the weights of a checkpoint, now or once the model is sharded; ValueError if they do not fit."""
        if self.initial_values is None:
            load_weights(self.model, manifest)
        else:
            self.initial_values = checkpoint_values(self.model, manifest)


def build_all(args: Arguments, engine: Engine, saved: SavedRun | None, finished: bool) -> RunParts:
    """Everything the loop needs; a `saved` run gives the model's config, and the batch after which its data go on.

    `finished`: there must be more steps than those saved, as where a complete run goes on or another run begins.

    Raises ValueError with one sentence that names the flag or file.
    """
    data, config = _build_data_and_config(args, engine, saved)
    model, initial_values = _build_model(args, config, engine, saved is not None)
    if args.train_only == "memories":
        _freeze_all_but_memories(model)
    recompute_activations(model, parse_recomputed(args.gradient_checkpointing))
    rows_per_step = args.rows_per_step(engine.accelerator.num_processes)
    tokens_per_step = rows_per_step * data.block_size
    total_steps = _total_steps(args, data, rows_per_step, saved)
    if saved and total_steps < saved.step + finished:
        raise ValueError(
            f"{saved.path} has done {saved.step} steps and the run now has {total_steps}: raise {args.length_flag} "
            "to continue it, or choose another --output_dir."
        )
    _warn_of_few_steps(args, data, tokens_per_step, total_steps)
    check_profiled(args.profile_steps, total_steps)
    optimizer = _build_optimizer(args.part(OptimizationArguments), model, tokens_per_step)
    schedule, schedule_change = _build_schedule(args, optimizer.defaults["lr"], total_steps, saved)
    plan = RunPlan(data.block_size, tokens_per_step, total_steps, schedule)
    return RunParts(data, model, optimizer, plan, initial_values, schedule_change)


def reads_anew(args: Arguments, saved: SavedRun) -> bool:
    """Whether the text is read from its first row on, by a run that begins from another one's checkpoint."""
    return args.ignore_data_skip and other_run(args.output_dir, str(saved.path)) is not None


def _build_data_and_config(args: Arguments, engine: Engine, saved: SavedRun | None) -> tuple[Data, PreTrainedConfig]:
    accelerator = engine.accelerator
    pretrained = None
    if args.model_name_or_path:
        pretrained = load_config(args.model_name_or_path, "model_name_or_path", args.part(ModelArguments))
    vocab_size = pretrained.vocab_size if pretrained else named_vocabulary(args.config_overrides)
    if vocab_size is None and args.dataset_name == SYNTHETIC and not args.tokenizer_name:
        vocab_size = DEFAULT_VOCAB_SIZE
    wanted = data_config(args, accelerator, pretrained, vocab_size)
    if saved:
        wanted = replace(wanted, saved_tokenizer=str(saved.path))
    # Checked first: preparing the data takes minutes, and a misspelled field would be reported only afterwards.
    schedule_of(args.part(OptimizationArguments), args.max_train_steps or LONG_RUN).check(args.learning_rate)
    _check_model(args, engine, pretrained, vocab_size, wanted.block_size)
    if not shows_bars(accelerator):
        disable_progress_bars()
    # One process prepares the data; the others then find them in the cache.
    with accelerator.local_main_process_first():
        data = build_data(
            wanted,
            rank=accelerator.process_index,
            world_size=accelerator.num_processes,
            state=None if saved is None or reads_anew(args, saved) else saved.state["rank"]["data"],
        )
    if pretrained and args.tokenizer_name and accelerator.is_main_process:
        warn_of_other_tokenizer(data.tokenizer, args.model_name_or_path)
    config = pretrained or _new_config(args, data.tokenizer, vocab_size or len(data.tokenizer))
    if saved and not args.lora_rank:
        # a preset, a default, or the model that the run began from may have changed since
        config = _saved_config(saved.path / "config.json", type(config))
    return data, config


def _saved_config(file: Path, config_class: type[PreTrainedConfig]) -> PreTrainedConfig:
    """The config of a checkpoint's model, of this class; ValueError that names the file if it is none."""
    if read_json(file, dict).get("model_type") != config_class.model_type:
        raise not_of_a_run(file, f"its model_type is not {config_class.model_type}")
    try:
        return config_class.from_pretrained(file.parent)
    except MISTAKES as error:
        raise not_of_a_run(file, error) from None


def _warn_of_few_steps(args: Arguments, data: Data, tokens_per_step: int, total_steps: int) -> None:
    """Warn of a run of few steps, and of a loaded model, which gets no defaults of a small text, of few an epoch."""
    what, steps = "An epoch has", FEW_STEPS
    if args.max_train_steps is None and total_steps < FEW_STEPS:
        what, steps = "The run has", total_steps
    elif args.model_name_or_path and data.train_tokens and tokens_per_step > data.block_size:
        steps = max(1, data.train_tokens // tokens_per_step)
    if steps < FEW_STEPS:
        warn_once(
            f"{what} {steps} step(s), since one reads {tokens_per_step:,} tokens and the text is short: lower "
            "--gradient_accumulation_steps or --per_device_train_batch_size, or raise --num_train_epochs."
        )


def _total_steps(args: Arguments, data: Data, rows_per_step: int, saved: SavedRun | None) -> int:
    if args.max_train_steps is not None:
        return args.max_train_steps
    batches = args.num_train_epochs * data.train.batches_per_epoch
    if saved is None:
        return max(1, math.ceil(batches / args.gradient_accumulation_steps))
    rows = batches * (rows_per_step // args.gradient_accumulation_steps)
    rows_read = saved.state["trainer"]["progress"]["tokens"] // data.block_size
    return saved.step + math.ceil((rows - rows_read) / rows_per_step)


def _build_schedule(
    args: Arguments, peak: float, total_steps: int, saved: SavedRun | None
) -> tuple[Schedule, str | None]:
    """The run's schedule, and the line that says how it differs from that of the `saved` run, if it does."""
    options = args.part(OptimizationArguments)
    change = None
    if saved is None:
        schedule = schedule_of(options, total_steps)
    else:
        before, rate = _schedule_of_checkpoint(saved)
        schedule = continued(options, total_steps, peak, before, saved.step, rate)
        if schedule != before:
            change = describe_change(before, schedule, peak, saved.step, rate, total_steps)
    schedule.check(peak)
    ends_before_run = schedule.end < total_steps and schedule.kind not in ENDLESS
    if ends_before_run and schedule.fractions(peak)(schedule.end) == 0:
        raise ValueError(
            f"--lr_scheduler_steps {schedule.end}: the learning rate is 0 from that step on and the run has "
            f"{total_steps}; give a schedule that ends above 0 (cosine_with_min_lr) or lower {args.length_flag}."
        )
    last = min(schedule.end, total_steps)
    end_of_warmup = schedule.begin + schedule.warmup
    if end_of_warmup >= last:
        warn_once(
            f"The learning rate never reaches its peak: the warm-up would end at step {end_of_warmup}, and schedule "
            f"or run end at step {last}; lower --num_warmup_steps."
        )
    return schedule, change


def _schedule_of_checkpoint(saved: SavedRun) -> tuple[Schedule, float]:
    """The schedule that wrote a checkpoint, and the learning rate that its next step would have had."""
    file = "trainer.json"
    try:
        schedule = saved_schedule(saved.state["trainer"]["schedule"])
        file = "scheduler.json"
        scheduler = saved.state["scheduler"]
        rate = float(scheduler["_last_lr"][0])
        peak = float(scheduler["base_lrs"][0])
        if not (0 <= rate < math.inf and 0 < peak < math.inf):
            raise ValueError(f"learning rates {rate} of {peak}")
        # Its settings may be of another kind's.
        file = "trainer.json"
        schedule.fractions(peak)(saved.step)
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
        raise not_of_a_run(saved.path / file, error) from None
    return schedule, rate


def _new_config(args: Arguments, tokenizer, vocab_size: int) -> PreTrainedConfig:
    return build_config(args.part(ModelArguments), tokenizer, vocab_size, hope_hf.PRESETS)


def _check_model(
    args: Arguments, engine: Engine, pretrained: PreTrainedConfig | None, vocab_size: int | None, block_size: int
) -> None:
    """Raise ValueError for mistakes that do not depend on the text: config, model, level options.

    `pretrained`: the config of a loaded model, or None; `vocab_size`: None if the tokenizer decides it.
    """
    config = pretrained or _new_config(args, None, vocab_size or LARGEST_VOCABULARY)
    check_block_size(block_size, config)
    if args.document_boundary == "carry":
        _check_carry(config)
    if args.train_only == "memories" and not (is_hope(config) and config.has_memories):
        raise ValueError(f"--train_only memories: this {config.model_type} has no layer of memories, leave it out.")
    if args.lora_rank:
        require_peft_for_training()
    if args.lora_rank and engine.shards_weights:
        raise ValueError("--lora_rank needs the whole model in each process: launch with accelerate_configs/ddp.yaml.")
    if args.push_to_hub:
        _check_push(config)
    if pretrained:
        return
    if vocab_size is None:
        config.vocab_size, config.pad_token_id = DEFAULT_VOCAB_SIZE, None
    # This check does not change the random numbers of the run's model.
    with torch.random.fork_rng(devices=[]):
        model = build_on_meta(args.part(ModelArguments), config)
        _build_optimizer(args.part(OptimizationArguments), model, tokens_per_step=1)


def _build_optimizer(options: OptimizationArguments, model: PreTrainedModel, tokens_per_step: int) -> LevelClock:
    return build_optimizer(
        model,
        options.optimizer,
        learning_rate=options.learning_rate,
        weight_decay=options.weight_decay,
        betas=(options.adam_beta1, options.adam_beta2),
        eps=options.adam_epsilon,
        tokens_per_step=tokens_per_step,
        level_optimizers=options.level_optimizers,
        vector_learning_rate=options.vector_learning_rate,
    )


def _build_model(
    args: Arguments, config: PreTrainedConfig, engine: Engine, continues: bool
) -> tuple[PreTrainedModel, DrawnValues | StoredValues | None]:
    """The model, and its values if it is on the meta device."""
    options = args.part(ModelArguments)
    if args.init == "sharded":
        model = build_on_meta(options, config)
        if args.model_name_or_path:
            return model, pretrained_values(options, config, model)
        return model, DrawnValues(build_on_meta(options, config), args.seed)
    # The estimate does not change the random numbers of the run's model.
    with torch.random.fork_rng(devices=[]):
        size = built_bytes(options, config, continues)
    try:
        check_host_memory(size, engine)
    except ValueError as error:
        # Fake tensors cannot be exchanged with other processes, and take no weights.
        if not args.dry_run or continues or engine.accelerator.num_processes > 1:
            raise
        warn_once(f"{error} The dry run goes on without the model's numbers.")
        return build_fake(options, config), None
    model = build_model(options, config)
    if args.lora_rank:
        add_lora(model, args.lora_rank, args.lora_alpha, args.model_name_or_path)
    return model, None


def _freeze_all_but_memories(model: PreTrainedModel) -> None:
    model.requires_grad_(False)
    for layer, block in enumerate(model.base_model.layers):
        if model.config.mixers[layer].is_recurrent:
            block.mixer.requires_grad_(True)


def data_config(
    args: Arguments, accelerator: Accelerator, pretrained: PreTrainedConfig | None, vocab_size: int | None
) -> DataConfig:
    """The part of the flags that the data need.

    `pretrained` is the config of a loaded model or None, `vocab_size` the embedding's if it is already fixed.
    """
    values = {field.name: getattr(args, field.name) for field in fields(DataConfig) if field.name in FLAGS}
    if args.block_size is None:
        values["block_size"] = min(LONGEST_DEFAULT_BLOCK, getattr(pretrained, "max_position_embeddings", math.inf))
    if pretrained is not None:
        values["tokenizer_name"] = args.tokenizer_name or args.model_name_or_path
    values["vocab_size"] = vocab_size
    if VOCAB_SIZE in args.defaults:
        values["default_vocab_size"] = args.defaults[VOCAB_SIZE].value
    values["dataloader_pin_memory"] = args.dataloader_pin_memory and accelerator.device.type == "cuda"
    return DataConfig(**values)


def _check_push(config: PreTrainedConfig) -> None:
    """ValueError for a model that is not HOPE; a warning if there is no login yet."""
    if not is_hope(config):
        raise ValueError(f"--push_to_hub uploads a HOPE and this is a {config.model_type}: train without it.")
    if huggingface_hub.get_token() is None:
        warn_once("--push_to_hub finds no login: run `hf auth login` before the training ends.")


def _check_carry(config: PreTrainedConfig) -> None:
    """ValueError if rows cannot continue in those of the next step."""
    if not is_hope(config) or not config.has_memories:
        kind = "attention mixer" if is_hope(config) else config.model_type
        raise ValueError(
            f"--document_boundary carry passes memories on, and the {kind} has none: use --document_boundary reset."
        )
    if config.has_positions:
        raise ValueError(
            "--document_boundary carry would keep the keys and values of all tokens for the layers with attention: "
            "use --document_boundary reset."
        )
