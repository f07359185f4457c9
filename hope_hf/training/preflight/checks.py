"""The checks of a dry run, functions `(facts) -> Result` of one process. `CHECKS` is their order on the console."""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from hope_hf.common.gpus import GIB
from hope_hf.common.recompute_flag import Recomputed, parse_recomputed

from .facts import Facts, Gpu, Room, RoomOptions

# Share of the free memory; above it the allocator's gaps and the system's own needs may not fit.
COMFORTABLE = 0.9
# The same on a CPU, whose allocator keeps a quarter to two fifths more than a step's tensors (docs/distributed.md).
COMFORTABLE_ON_CPU = 0.7
BUSY, USED = 10, 2 * GIB
"""Percent of the time, and bytes, of a GPU that another program uses: more than a desktop's."""
WARM, HOT = 80, 90
"""Degrees Celsius of a GPU that does nothing yet; data-centre GPUs slow down at about 85 to 95."""
# Muennighoff et al. 2023 (arXiv 2305.16264): up to four passes over the same text are nearly as good as new text.
MOST_EPOCHS = 4
EXPANDABLE = "expandable_segments:True"
# The second is torch's older name.
ALLOCATOR = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"


LEVELS = ("ok", "warn", "fail")


@dataclass(frozen=True)
class Result:
    """What a check finds on one process.

    Attributes:
        text: the reason, and after a colon or semicolon the fix.
        strain: orders results of one level; the largest is the worst.
    """

    level: Literal["ok", "warn", "fail"]
    text: str
    strain: float = 0.0


def worst(results: list[Result]) -> Result:
    """The worst over all processes, in order of their ranks; it names its rank if the processes differ."""
    result = max(results, key=lambda result: (LEVELS.index(result.level), result.strain))
    if len({result.text for result in results}) == 1:
        return result
    return replace(result, text=f"{result.text} (rank {results.index(result)})")


def line(name: str, result: Result) -> str:
    """A check's line on the console."""
    return f"{result.level:<4}  {name:<9}  {result.text}"


def check_processes(facts: Facts) -> Result:
    """The guard has compared the processes before, and ends the run if they differ."""
    if facts.processes == 1:
        return Result("ok", "one process")
    return Result("ok", f"{facts.processes} processes have the same flags, data and code")


def check_run(facts: Facts) -> Result:
    """Whether the run begins, continues or is complete."""
    if facts.in_use:
        return Result(
            "fail",
            f"{facts.options.output_dir} is in use, another process trains in it: wait, or choose another folder",
        )
    if facts.continues is None:
        return Result("ok", f"begins at step 0 of {facts.total_steps:,}")
    if facts.step >= facts.total_steps:
        return Result(
            "warn",
            f"{facts.continues} is at step {facts.step:,} of {facts.total_steps:,}: the same command only finishes it",
        )
    return Result("ok", f"continues from {facts.continues} at step {facts.step:,} of {facts.total_steps:,}")


def check_trackers(facts: Facts) -> Result:
    """The trackers of `--report_to`. Nothing is sent; W&B itself reports a missing key when the run starts."""
    names, mode = facts.trackers, os.environ.get("WANDB_MODE", "online")
    if "wandb" in names and mode == "disabled":
        return Result("warn", "WANDB_MODE is disabled, so W&B records nothing: unset it or write offline")
    if "wandb" in names and mode in ("offline", "dryrun"):
        return Result("ok", "wandb offline: `wandb sync` sends the run later")
    return Result("ok", ", ".join(names) or "none besides metrics.jsonl")


def check_data(facts: Facts) -> Result:
    """Whether there is text for every process, for all steps and for the evaluation."""
    text = facts.text
    if text.rows is None:
        return Result("ok", text.description)
    if text.rows < facts.processes:
        return Result(
            "fail",
            f"the training text has {text.rows:,} rows for {facts.processes:,} processes: add text, lower "
            "--block_size or start fewer",
        )
    if text.rows < text.rows_per_step:
        return Result(
            "warn",
            f"a step reads {text.rows_per_step:,} rows and the training text has {text.rows:,}: rows repeat within a "
            "step, so add text or lower --per_device_train_batch_size",
        )
    epochs = facts.total_steps * text.rows_per_step / text.rows
    if epochs > MOST_EPOCHS:
        return Result(
            "warn",
            f"{facts.total_steps:,} steps read the training text {epochs:,.1f} times, and more than {MOST_EPOCHS} "
            "teach little: add text or lower --max_train_steps",
        )
    if text.validation_rows < 2:
        return Result(
            "warn",
            "the validation text has less than two rows, so its loss says little: raise --validation_split_percentage "
            "or name a larger --validation_file",
        )
    return Result("ok", f"{text.description}; {epochs:.2g} epochs")


def check_disk(facts: Room) -> Result:
    """Whether checkpoints can be written, and space for those kept and for one more before the oldest is deleted.

    These are at least 2, or one in a short run.
    """
    sizes, options = facts.sizes, facts.options
    if facts.unwritable is not None:
        return Result(
            "fail",
            f"{options.output_dir} takes no checkpoint ({facts.unwritable}): make it writable or choose another disk",
        )
    each = sizes.saved + (0 if options.save_only_model else sizes.optimizer)
    count = max(2, options.save_total_limit + 1)
    if options.keep_every is not None:
        count += facts.total_steps // options.keep_every
    left = facts.total_steps - facts.step
    # The last step has one whatever its number.
    written = 1 + ((left - 1) // options.checkpointing_steps if options.checkpointing_steps else 0)
    # The finished run writes the weights once more; the best model is replaced by a second one.
    weights = sizes.saved * (1 if options.keep_best == "none" else 3)
    need = min(count * each - facts.used, written * each) + weights
    free = facts.free.disk
    count = min(count, written)
    needed = max(0, need)
    reason = f"{count} checkpoint(s) of {_gib(each)} and the weights need {_gib(needed)} more"
    if free is None:
        return Result("warn", f"{reason}, and the file system does not say what is free: compare by hand")
    reason = f"{reason}, {_gib(free)} free"
    strain = _strain(need, free)
    if need > free:
        return Result("fail", f"{reason}: free space, lower --save_total_limit or choose another disk", strain)
    if need + each > free:
        return Result("warn", f"{reason}, less than for one more: free space", strain)
    return Result("ok", reason, strain)


def check_host(facts: Room) -> Result:
    """The machine's memory: every process may first build the model there, and checkpoints pass through it."""
    sizes, free = facts.sizes, facts.free.host
    built = 0 if facts.options.init == "sharded" else facts.local_processes * sizes.weights
    # The first process gathers the whole weights for a checkpoint; a background one copies the state held here.
    saved = 0 if facts.in_parts else sizes.weights
    if facts.options.async_save:
        share = facts.local_processes / facts.processes if sizes.is_shared_out else 1
        saved += int(share * (sizes.weights + sizes.optimizer))
    trained = sizes.offloaded if facts.on_gpu else facts.local_processes * sizes.peak
    need = max(built, trained + saved)
    return _fits(
        need, free, f"the work of {facts.local_processes} process(es) on this machine",
        "start fewer processes a machine, take one with more memory or raise the limit of its container",
    )  # fmt: skip


def check_gpus(facts: Facts) -> Result:
    """Whether the process's GPU is idle and cool."""
    gpu = facts.gpu
    if not facts.on_gpu:
        if gpu is None:
            return Result("ok", "none, the run uses the CPU")
        return Result(
            "warn",
            "the run uses the CPU and the machine has a GPU: install torch for it, or take a launch file without "
            "use_cpu",
        )
    if not isinstance(gpu, Gpu):
        return Result("warn", f"idle and cool or not is unknown ({gpu}): pip install nvidia-ml-py, or compare by hand")
    words = f"{gpu.busy} % busy, {_gib(gpu.used)} used, {gpu.temperature} C"
    if gpu.temperature >= HOT:
        return Result("fail", f"{words}: too hot to begin, look at its cooling", gpu.temperature)
    if gpu.busy > BUSY or gpu.used > USED:
        return Result("warn", f"{words}: another program uses it, end that one (nvidia-smi names it)", 1e3)
    if gpu.temperature >= WARM:
        return Result("warn", f"{words}: hot without work, it will slow down; look at its cooling", gpu.temperature)
    return Result("ok", words, gpu.temperature)


def check_allocator(facts: Facts) -> Result:
    """Whether torch's setting against fragmented memory is on, on a GPU."""
    if not facts.on_gpu:
        return Result("ok", "not used on the CPU")
    for name in ALLOCATOR:
        if EXPANDABLE in os.environ.get(name, "").replace(" ", ""):
            return Result("ok", f"{name} has {EXPANDABLE}")
    return Result("warn", f"memory may be lost to fragmentation: export {ALLOCATOR[0]}={EXPANDABLE}")


def check_memory(facts: Room) -> Result:
    """The planned memory against the memory that was free before the run."""
    sizes = facts.sizes
    how = "estimated" if sizes.is_estimate else "planned"
    whole = f"give --sync_each_batch ({_gib(sizes.whole_gradients)} are whole gradients between batches)"
    fix = ", ".join(([whole] if sizes.whole_gradients else []) + smaller_steps(facts.options))
    if facts.on_gpu:
        return _fits(sizes.peak, facts.free.device, f"a step, {how},", fix)
    count = facts.local_processes
    what = f"a step of {count} process(es), {how},"
    return _fits(count * sizes.peak, facts.free.host, what, fix, COMFORTABLE_ON_CPU)


def smaller_steps(options: RoomOptions) -> list[str]:
    """Flags that make a step's memory smaller, without those that are set."""
    ways = {
        "lower --per_device_train_batch_size": options.per_device_train_batch_size > 1,
        "lower --block_size": True,
        "give --gradient_checkpointing": parse_recomputed(options.gradient_checkpointing) != Recomputed("block"),
        "see `hope-hf plan`": True,
    }
    return [words for words, helps in ways.items() if helps]


CHECKS: dict[str, Callable[[Facts], Result]] = {
    "processes": check_processes,
    "run": check_run,
    "trackers": check_trackers,
    "data": check_data,
    "disk": check_disk,
    "host": check_host,
    "gpus": check_gpus,
    "allocator": check_allocator,
    "memory": check_memory,
}


def _fits(need: int, free: int | None, what: str, fix: str, comfortable: float = COMFORTABLE) -> Result:
    if free is None:
        return Result("warn", f"{what} needs {_gib(need)}, and the system does not say what is free: compare by hand")
    reason = f"{what} needs {_gib(need)} of {_gib(free)} free"
    if need > free:
        return Result("fail", f"{reason}: {fix}", _strain(need, free))
    if need > comfortable * free:
        return Result("warn", f"{reason}, almost all: {fix}", _strain(need, free))
    return Result("ok", reason, _strain(need, free))


def _strain(need: int, free: int) -> float:
    # Nothing at all may be free.
    return max(0, need) / max(1, free)


def _gib(size: float) -> str:
    return f"{size / GIB:.2f} GiB"
