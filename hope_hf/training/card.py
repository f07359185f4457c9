"""The run card: what a run trains on, how and where, printed before its first step."""

import torch
from accelerate import Accelerator
from transformers import PreTrainedModel

from hope_hf.common.defaults import default_lines
from hope_hf.common.flags import ModelArguments
from hope_hf.common.gpus import GIB
from hope_hf.common.run_arguments import Arguments, OptimizationArguments
from hope_hf.optim import LevelClock, warn_short_levels

from .checkpoints.reader import SavedRun
from .engines.base import Engine
from .engines.placement import device_name
from .setup import RunParts, RunPlan


def run_card(args: Arguments, engine: Engine, parts: RunParts, saved: SavedRun | None) -> str:
    """The card of a run whose parts are not prepared yet, and which goes on from `saved` if that is given.

    Warns, on rank 0, of levels that rarely step.
    """
    accelerator, plan = engine.accelerator, parts.plan
    options = args.part(OptimizationArguments)
    rows = {
        "model": model_row(args.part(ModelArguments), parts.model, args.lora_rank),
        "data": parts.data.description,
        "batch": batch_row(options, plan, accelerator.num_processes),
        "steps": steps_row(plan, saved),
        "optimizer": optimizer_row(options, plan),
        "engine": engine.name,
    }
    if options.gradient_accumulation_steps > 1 and engine.whole_gradients is not None:
        batches = f"between {options.gradient_accumulation_steps} batches"
        rows["gradients"] = gradients_row(engine, parts.model, batches, args.sync_each_batch)
    rows["device"] = device_row(accelerator)
    rows |= level_rows(parts.optimizer, plan.total_steps)
    if accelerator.is_main_process:
        warn_short_levels(parts.optimizer, plan.total_steps)
    if parts.data.unigram_loss is not None:
        loss = parts.data.unigram_loss
        rows["expect"] = f"a loss below {loss:.2f}, that of a unigram model of the training text"
    rows["output"] = args.output_dir
    if args.defaults:
        rows["defaults"] = "of a small text; a flag overrides its own"
    width = max(map(len, rows))
    lines = [f"{name:<{width}}  {text}" for name, text in rows.items()]
    for line in default_lines(args.defaults):
        lines.append(f"{'':<{width}}  {line}")
    return "\n".join(lines)


def model_row(args: ModelArguments, model: PreTrainedModel, lora_rank: int | None) -> str:
    """Architecture, size and origin of the model."""
    row = f"{model.config.model_type}, {model.num_parameters():,} parameters"
    if args.model_name_or_path:
        row += f", from {args.model_name_or_path}"
    else:
        default = "tiny" if args.model_type in (None, "hope") else "default size"
        row += f", new: {args.config_name or default}"
        if args.config_overrides:
            row += f" with {args.config_overrides}"
    if lora_rank:
        trained = model.num_parameters(only_trainable=True)
        row += f"; LoRA of rank {lora_rank} trains {trained:,} of them"
    return row


def batch_row(options: OptimizationArguments, plan: RunPlan, processes: int) -> str:
    """Tokens of an optimizer step, as a product."""
    return (
        f"{plan.tokens_per_step:,} tokens per step = {options.per_device_train_batch_size} rows x "
        f"{plan.block_size:,} tokens x {options.gradient_accumulation_steps} accumulated x {processes} process(es)"
    )


def steps_row(plan: RunPlan, saved: SavedRun | None) -> str:
    """Length of the run."""
    warmup = plan.schedule.warmup
    part = f"of which {warmup:,}" if warmup < plan.total_steps else "all of them"
    return f"{plan.total_steps:,}, {part} warm-up; {plan.total_tokens(saved):,} tokens"


def optimizer_row(options: OptimizationArguments, plan: RunPlan) -> str:
    """Optimizer, peak rates, schedule, decay and clipping."""
    vectors, length = "", ""
    if options.vector_learning_rate is not None:
        vectors = f" (vectors {options.vector_learning_rate:g})"
    if plan.schedule.end != plan.total_steps:
        length = f" of {plan.schedule.end:,} steps"
    return (
        f"{options.optimizer}, learning rate {options.learning_rate:g}{vectors}, {options.lr_scheduler_type}{length}, "
        f"weight decay {options.weight_decay:g}, clip {options.max_grad_norm:g}"
    )


def gradients_row(engine: Engine, model: PreTrainedModel, batches: str, syncs_each_batch: bool) -> str:
    """GiB of gradients between accumulated batches, for an engine that may keep whole gradients there."""
    trained = model.num_parameters(only_trainable=True)
    whole = trained * engine.whole_gradients.itemsize / GIB
    stored = sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)
    part = stored / engine.launch().parts / GIB
    if syncs_each_batch:
        return f"sharded {batches}: {part:.3g} GiB per process (whole: {whole:.3g})"
    return f"whole {batches}: {whole:.3g} GiB per process; --sync_each_batch: {part:.3g} GiB"


def device_row(accelerator: Accelerator) -> str:
    """Device, threads and precision."""
    precision = accelerator.mixed_precision
    shown = "fp32" if precision == "no" else f"{precision} mixed"
    threads = torch.get_num_threads()
    return f"{device_name(accelerator.device)}, {threads} thread(s) per process, precision {shown}"


def level_rows(optimizer: LevelClock, total_steps: int) -> dict[str, str]:
    """How often each level of a HOPE steps."""
    rows = {}
    for level, report in sorted(optimizer.level_report().items()):
        period = report["period_steps"]
        every = "step" if period == 1 else f"{period} steps"
        rows[f"level {level}"] = f"updated every {every}, {total_steps // period} times in this run"
    return rows
