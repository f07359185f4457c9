"""The run card: what the run will do, printed before it starts."""

import torch

from hope_hf.optim import warn_short_levels
from hope_hf.step.arguments import Arguments
from hope_hf.step.gpus import GIB

from .engines.base import Engine
from .engines.placement import device_name


def run_card(args: Arguments, engine: Engine, run) -> str:
    """The card as text, of the trainer's `Run` before it is prepared. Warns, on rank 0, of levels that rarely step."""
    model, optimizer, data, plan = run.model, run.optimizer, run.data, run.plan
    accelerator = engine.accelerator
    mixed = accelerator.mixed_precision
    accumulates_whole = args.gradient_accumulation_steps > 1 and engine.whole_gradients is not None
    warmup = f"of which {plan.warmup_steps:,}" if plan.warmup_steps < plan.total_steps else "all of them"
    rows = {
        "model": f"{model.config.model_type}, {model.num_parameters():,} parameters"
        + (f", from {args.model_name_or_path}" if args.model_name_or_path else f", {_size(args)}"),
        "data": data.description,
        "batch": f"{plan.tokens_per_step:,} tokens per step = {args.per_device_train_batch_size} rows x "
        f"{plan.block_size:,} tokens x {args.gradient_accumulation_steps} accumulated x "
        f"{accelerator.num_processes} process(es)",
        "steps": f"{plan.total_steps:,}, {warmup} warm-up; {plan.total_tokens:,} tokens",
        "optimizer": f"{args.optimizer}, learning rate {args.learning_rate:g}"
        + (f" (vectors {args.vector_learning_rate:g})" if args.vector_learning_rate is not None else "")
        + f", {args.lr_scheduler_type}, weight decay {args.weight_decay:g}, clip {args.max_grad_norm:g}",
        "engine": engine.name,
        **({"gradients": _gradients(args, engine, model)} if accumulates_whole else {}),
        "device": f"{device_name(accelerator.device)}, {torch.get_num_threads()} thread(s) per process, "
        f"precision {'fp32' if mixed == 'no' else f'{mixed} mixed'}",
    }
    for level, report in sorted(optimizer.level_report().items()):
        updates = plan.total_steps // report["period_steps"]
        rows[f"level {level}"] = f"every {report['period_steps']} step(s), {updates} updates"
    if accelerator.is_main_process:
        warn_short_levels(optimizer, plan.total_steps)
    rows["output"] = args.output_dir
    width = max(len(name) for name in rows)
    return "\n".join(f"{name:<{width}}  {text}" for name, text in rows.items())


def _gradients(args: Arguments, engine: Engine, model) -> str:
    """What a process holds between accumulated batches, under an engine that would hold whole gradients there."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    whole = sum(parameter.numel() for parameter in trained) * engine.whole_gradients.itemsize
    part = sum(parameter.nbytes for parameter in trained) / engine.launch().parts
    batches = f"between {args.gradient_accumulation_steps} batches"
    if args.sync_each_batch:
        return f"sharded {batches}: {part / GIB:.3g} GiB a rank (whole: {whole / GIB:.3g})"
    return f"whole {batches}: {whole / GIB:.3g} GiB a rank; --sync_each_batch: {part / GIB:.3g} GiB"


def _size(args: Arguments) -> str:
    name = args.config_name or ("tiny" if args.model_type in (None, "hope") else "default size")
    return f"new: {name}" + (f" with {args.config_overrides}" if args.config_overrides else "")
