"""Data, model, optimizer and plan of a run, built and checked before anything is written, and the run's card."""

import math
from dataclasses import dataclass, fields, replace
from pathlib import Path

import huggingface_hub
import torch
from accelerate import Accelerator
from transformers import PreTrainedModel

import hope_hf
from hope_hf.common.adapters import add_lora, require_peft_for_training
from hope_hf.common.defaults import VOCAB_SIZE, default_lines
from hope_hf.common.flags import LARGEST_VOCABULARY
from hope_hf.common.gpus import GIB
from hope_hf.common.models import build_config, build_model, is_hope, load_config, named_vocabulary
from hope_hf.common.process import MISTAKES, warn_once
from hope_hf.common.recompute import parse_recomputed, recompute_activations
from hope_hf.common.run_arguments import FLAGS, LONGEST_DEFAULT_BLOCK, Arguments, check_block_size
from hope_hf.data import (
    DEFAULT_VOCAB_SIZE,
    Data,
    DataConfig,
    build_data,
    disable_progress_bars,
    warn_of_other_tokenizer,
)
from hope_hf.optim import LevelClock, build_optimizer, warn_short_levels

from .checkpoints.reader import SavedRun, other_run
from .checkpoints.state_files import not_of_a_run, read_json
from .engines.base import Engine
from .engines.placement import device_name
from .initial import (
    DrawnValues,
    StoredValues,
    build_fake,
    build_on_meta,
    built_bytes,
    check_host_memory,
    pretrained_values,
)
from .process import shows_bars
from .schedule import ENDLESS, Schedule, continued, describe_change, saved_schedule, schedule_of
from .sequence import add_rates, check_learning, set_learning
from .watch.profile import check_profiled

SYNTHETIC = "synthetic"
LONG_RUN = 10**6
# Hardly anything is learned in fewer steps.
FEW_STEPS = 10


@dataclass(frozen=True)
class Plan:
    """The length of the run."""

    block_size: int
    """Tokens per row."""
    tokens_per_step: int
    """Over all processes and accumulated batches."""
    total_steps: int
    schedule: Schedule

    @property
    def total_tokens(self) -> int:
        return self.total_steps * self.tokens_per_step


@dataclass
class Run:
    """The parts of a run, none of them wrapped."""

    data: Data
    model: PreTrainedModel
    optimizer: LevelClock
    plan: Plan
    values: DrawnValues | StoredValues | None
    """What fills a model on the meta device; None for others."""
    schedule_changes: list[str]
    """The line that says how the schedule differs from the checkpoint's, if it does."""


def build_all(args: Arguments, engine: Engine, saved: SavedRun | None, finished: bool) -> Run:
    """Everything the loop needs; a `saved` run gives the model's config, and the batch after which its data go on.

    `finished`: there must be more steps than those saved, as where a complete run goes on or another run begins.

    Raises ValueError with one sentence that names the flag or file.
    """
    accelerator = engine.accelerator
    pretrained = load_config(args.model_name_or_path, "model_name_or_path", args) if args.model_name_or_path else None
    vocab_size = pretrained.vocab_size if pretrained else named_vocabulary(args.config_overrides)
    if vocab_size is None and args.dataset_name == SYNTHETIC and not args.tokenizer_name:
        vocab_size = DEFAULT_VOCAB_SIZE
    wanted = data_config(args, accelerator, pretrained, vocab_size)
    if saved:
        wanted = replace(wanted, saved_tokenizer=str(saved.path))
    if pretrained:
        set_learning(args, pretrained)
    # Checked first: preparing the data takes minutes, and a misspelled field would be reported only afterwards.
    schedule_of(args, args.max_train_steps or LONG_RUN).check(args.learning_rate)
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
    model, values = _model(args, config, engine, saved is not None)
    if args.train_only == "memories":
        _freeze_all_but_memories(model)
    recompute_activations(model, parse_recomputed(args.gradient_checkpointing))
    rows_per_step = args.rows_per_step(accelerator.num_processes)
    tokens_per_step = rows_per_step * data.block_size
    total_steps = _total_steps(args, data, rows_per_step, saved)
    if saved and total_steps < saved.step + finished:
        raise ValueError(
            f"{saved.path} has done {saved.step} steps and the run now has {total_steps}: raise {args.length_flag} "
            "to continue it, or choose another --output_dir."
        )
    _warn_of_few_steps(args, data, tokens_per_step, total_steps)
    check_profiled(args.profile_steps, total_steps)
    optimizer = _optimizer(args, model, tokens_per_step)
    schedule, changes = _schedule(args, data, optimizer, total_steps, rows_per_step, saved)
    length = min(schedule.end, total_steps)
    if schedule.begin + schedule.warmup >= length:
        warn_once(
            f"The learning rate never reaches its peak: the warm-up has {schedule.warmup} steps, and schedule or run "
            f"end at step {length}; lower --num_warmup_steps."
        )
    plan = Plan(data.block_size, tokens_per_step, total_steps, schedule)
    return Run(data, model, optimizer, plan, values, changes)


def reads_anew(args: Arguments, saved: SavedRun) -> bool:
    """Whether the text is read from its first row on, by a run that begins from another one's checkpoint."""
    return args.ignore_data_skip and other_run(args.output_dir, str(saved.path)) is not None


def _saved_config(file: Path, kind: type):
    """The config of a checkpoint's model, of this class; ValueError that names the file if it is none."""
    if read_json(file, dict).get("model_type") != kind.model_type:
        raise not_of_a_run(file, f"its model_type is not {kind.model_type}")
    try:
        return kind.from_pretrained(file.parent)
    except MISTAKES as error:
        raise not_of_a_run(file, error) from None


def _warn_of_few_steps(args: Arguments, data: Data, tokens_per_step: int, total_steps: int) -> None:
    """Warn of a run of few steps, and of a loaded model, which gets no defaults of a small text, of few an epoch."""
    few = None
    if args.max_train_steps is None and total_steps < FEW_STEPS:
        few = f"The run has {total_steps} step(s)"
    elif args.model_name_or_path and data.train_tokens and tokens_per_step > data.block_size:
        of_an_epoch = max(1, data.train_tokens // tokens_per_step)
        few = f"An epoch has {of_an_epoch} step(s)" if of_an_epoch < FEW_STEPS else None
    if few:
        warn_once(
            f"{few}, since one reads {tokens_per_step:,} tokens and the text is short: lower "
            "--gradient_accumulation_steps or --per_device_train_batch_size, or raise --num_train_epochs."
        )


def _total_steps(args: Arguments, data: Data, rows_per_step: int, saved: SavedRun | None) -> int:
    if args.max_train_steps is not None:
        return args.max_train_steps
    batches = args.num_train_epochs * data.train.batches_per_epoch
    if saved is None:
        return max(1, math.ceil(batches / args.gradient_accumulation_steps))
    rows = batches * (rows_per_step // args.gradient_accumulation_steps)
    read = saved.state["trainer"]["progress"]["tokens"] // data.block_size
    return saved.step + math.ceil((rows - read) / rows_per_step)


def _schedule(
    args: Arguments, data: Data, optimizer: LevelClock, total_steps: int, rows_per_step: int, saved: SavedRun | None
) -> tuple[Schedule, list[str]]:
    """The run's schedule, and the line that says how it differs from that of the `saved` run, if it does."""
    peak, changes = optimizer.defaults["lr"], []
    if saved is None:
        schedule = schedule_of(args, total_steps)
    else:
        trainer, rates = saved.state["trainer"], saved.state["scheduler"]
        file = "trainer.json"
        try:
            if "schedule" in trainer:
                old = saved_schedule(trainer["schedule"])
            else:
                # A checkpoint of before: its flags had one schedule of the run's length.
                flags = {name: value for name, value in trainer["identity"].items() if name in FLAGS}
                before = replace(args, **flags)
                old = schedule_of(before, _total_steps(before, data, rows_per_step, None))
            # Its settings may be of another kind's.
            old.fractions(peak)(saved.step)
            file = "scheduler.json"
            rate, old_peak = float(rates["_last_lr"][0]), float(rates["base_lrs"][0])
            if not (0 <= rate < math.inf and 0 < old_peak < math.inf):
                raise ValueError(f"learning rates {rate} of {old_peak}")
        except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
            raise not_of_a_run(saved.path / file, error) from None
        schedule = continued(args, total_steps, peak, old, saved.step, rate)
        if schedule != old:
            changes.append(describe_change(old, schedule, peak, saved.step, rate, total_steps))
    schedule.check(peak)
    if schedule.end < total_steps and schedule.kind not in ENDLESS and schedule.fractions(peak)(schedule.end) == 0:
        raise ValueError(
            f"--lr_scheduler_steps {schedule.end}: the learning rate is 0 from that step on and the run has "
            f"{total_steps}; give a schedule that ends above 0 (cosine_with_min_lr) or lower {args.length_flag}."
        )
    return schedule, changes


def _new_config(args: Arguments, tokenizer, vocab_size: int):
    config = build_config(args, tokenizer, vocab_size, hope_hf.PRESETS)
    set_learning(args, config)
    return config


def _check_model(args: Arguments, engine: Engine, pretrained, vocab_size: int | None, block_size: int):
    """Raise ValueError for mistakes that do not depend on the text: config, model, level options.

    `pretrained`: the config of a loaded model, or None; `vocab_size`: None if the tokenizer decides it.
    """
    config = pretrained or _new_config(args, None, vocab_size or LARGEST_VOCABULARY)
    check_block_size(block_size, config)
    check_learning(args, config, block_size, engine)
    _check_carry(args, config)
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
        _optimizer(args, build_on_meta(args, config), tokens_per_step=1)


def _optimizer(args: Arguments, model: PreTrainedModel, tokens_per_step: int) -> LevelClock:
    return build_optimizer(
        model,
        args.optimizer,
        learning_rate=args.learning_rate,
        weight_decay=args.weight_decay,
        betas=(args.adam_beta1, args.adam_beta2),
        eps=args.adam_epsilon,
        tokens_per_step=tokens_per_step,
        level_optimizers=args.level_optimizers,
        vector_learning_rate=args.vector_learning_rate,
    )


def _model(
    args: Arguments, config, engine: Engine, continues: bool
) -> tuple[PreTrainedModel, DrawnValues | StoredValues | None]:
    """The model, and its values if it is on the meta device."""
    random = torch.get_rng_state()
    if args.init == "sharded":
        model = build_on_meta(args, config)
        if args.model_name_or_path:
            return model, pretrained_values(args, config, model)
        return model, DrawnValues(args, config, model, random)
    size = built_bytes(args, config, continues)
    torch.set_rng_state(random)
    try:
        check_host_memory(size, engine)
    except ValueError as error:
        # Fake tensors cannot be exchanged with other processes, and take no weights.
        if not args.dry_run or continues or engine.accelerator.num_processes > 1:
            raise
        warn_once(f"{error} The dry run goes on without the model's numbers.")
        return build_fake(args, config), None
    model = build_model(args, config)
    add_rates(model, config)
    if args.lora_rank:
        add_lora(model, args.lora_rank, args.lora_alpha, args.model_name_or_path)
    return model, None


def _freeze_all_but_memories(model: PreTrainedModel) -> None:
    for name, parameter in model.named_parameters():
        _, _, layer, part, *_ = name.split(".") if ".layers." in name else (None,) * 4
        parameter.requires_grad = part == "mixer" and model.config.mixers[int(layer)].is_recurrent


def data_config(args: Arguments, accelerator: Accelerator, pretrained, vocab_size: int | None) -> DataConfig:
    """The part of the flags that the data need.

    `pretrained` is the config of a loaded model or None, `vocab_size` the embedding's if it is already fixed.
    """
    values = {f.name: getattr(args, f.name) for f in fields(DataConfig) if f.name in FLAGS}
    if args.block_size is None:
        values["block_size"] = min(LONGEST_DEFAULT_BLOCK, getattr(pretrained, "max_position_embeddings", math.inf))
    if pretrained is not None:
        values["tokenizer_name"] = args.tokenizer_name or args.model_name_or_path
    values["vocab_size"] = vocab_size
    if VOCAB_SIZE in args.defaults:
        values["default_vocab_size"] = args.defaults[VOCAB_SIZE].value
    values["dataloader_pin_memory"] = args.dataloader_pin_memory and accelerator.device.type == "cuda"
    return DataConfig(**values)


def _check_push(config):
    """ValueError for a model that is not HOPE; a warning if there is no login yet."""
    if not is_hope(config):
        raise ValueError(f"--push_to_hub uploads a HOPE and this is a {config.model_type}: train without it.")
    if huggingface_hub.get_token() is None:
        warn_once("--push_to_hub finds no login: run `hf auth login` before the training ends.")


def _check_carry(args: Arguments, config):
    if args.document_boundary != "carry":
        return
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


def run_card(args: Arguments, engine: Engine, run) -> str:
    """The card as text, of the trainer's `Run` before it is prepared. Warns, on rank 0, of levels that rarely step."""
    model, optimizer, data, plan = run.model, run.optimizer, run.data, run.plan
    accelerator = engine.accelerator
    mixed = accelerator.mixed_precision
    accumulates_whole = args.gradient_accumulation_steps > 1 and engine.whole_gradients is not None
    schedule = plan.schedule
    warmup = f"of which {schedule.warmup:,}" if schedule.warmup < plan.total_steps else "all of them"
    length = "" if schedule.end == plan.total_steps else f" of {schedule.end:,} steps"
    rows = {
        "model": f"{model.config.model_type}, {model.num_parameters():,} parameters"
        + (f", from {args.model_name_or_path}" if args.model_name_or_path else f", {_size(args)}")
        + (f"; LoRA of rank {args.lora_rank} trains {_trained(model):,} of them" if args.lora_rank else ""),
        "data": data.description,
        "batch": f"{plan.tokens_per_step:,} tokens per step = {args.per_device_train_batch_size} rows x "
        f"{plan.block_size:,} tokens x {args.gradient_accumulation_steps} accumulated x "
        f"{accelerator.num_processes} process(es)",
        "steps": f"{plan.total_steps:,}, {warmup} warm-up; {plan.total_tokens:,} tokens",
        "optimizer": f"{args.optimizer}, learning rate {args.learning_rate:g}"
        + (f" (vectors {args.vector_learning_rate:g})" if args.vector_learning_rate is not None else "")
        + f", {args.lr_scheduler_type}{length}, weight decay {args.weight_decay:g}, clip {args.max_grad_norm:g}",
        "engine": engine.name,
        **({"gradients": _gradients(args, engine, model)} if accumulates_whole else {}),
        "device": f"{device_name(accelerator.device)}, {torch.get_num_threads()} thread(s) per process, "
        f"precision {'fp32' if mixed == 'no' else f'{mixed} mixed'}",
    }
    for level, report in sorted(optimizer.level_report().items()):
        period = report["period_steps"]
        every = "step" if period == 1 else f"{period} steps"
        rows[f"level {level}"] = f"updated every {every}, {plan.total_steps // period} times in this run"
    if accelerator.is_main_process:
        warn_short_levels(optimizer, plan.total_steps)
    if data.unigram_loss is not None:
        rows["expect"] = f"a loss below {data.unigram_loss:.2f}, that of a unigram model of the training text"
    rows["output"] = args.output_dir
    if args.defaults:
        rows["defaults"] = "of a small text; a flag overrides its own"
    width = max(len(name) for name in rows)
    lines = [f"{name:<{width}}  {text}" for name, text in rows.items()]
    return "\n".join([*lines, *(f"{'':<{width}}  {line}" for line in default_lines(args.defaults))])


def _trained(model: PreTrainedModel) -> int:
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def _gradients(args: Arguments, engine: Engine, model) -> str:
    """GiB of gradients between accumulated batches, for an engine that may keep whole gradients there."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    whole = sum(parameter.numel() for parameter in trained) * engine.whole_gradients.itemsize
    part = sum(parameter.nbytes for parameter in trained) / engine.launch().parts
    batches = f"between {args.gradient_accumulation_steps} batches"
    if args.sync_each_batch:
        return f"sharded {batches}: {part / GIB:.3g} GiB per process (whole: {whole / GIB:.3g})"
    return f"whole {batches}: {whole / GIB:.3g} GiB per process; --sync_each_batch: {part / GIB:.3g} GiB"


def _size(args: Arguments) -> str:
    name = args.config_name or ("tiny" if args.model_type in (None, "hope") else "default size")
    return f"new: {name}" + (f" with {args.config_overrides}" if args.config_overrides else "")
