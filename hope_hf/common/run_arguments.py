"""The flags of a run: one dataclass per theme; names as in transformers' ``run_clm.py``.

``hope_hf.training.parsing`` reads them from a command line or a YAML file.
"""

from dataclasses import dataclass, field, fields
from typing import Literal

from .defaults import Default
from .flags import COUNT, LONGEST, OR_NONE, ROWS, SEED, THREADS, ModelArguments, TextArguments, flag
from .names import OPTIMIZERS
from .recipe import LENGTH
from .recompute_flag import recomputing_flag

LONGEST_DEFAULT_BLOCK = 1024


@dataclass
class DataArguments(TextArguments):
    """Which text is read, and how it is cut into rows. Without a data set or file: the built-in corpus."""

    block_size: int | None = flag(
        None,
        "Tokens per row (default: the model's longest input, at most 1,024; 256 for a small --train_file).",
        least=2,
        most=LONGEST,
    )
    assistant_only_loss: bool = flag(
        False, "Read chats (a column messages) through the chat template, and learn the assistant's turns only."
    )
    long_chats: Literal["keep", "cut", "drop"] = flag(
        "keep",
        "Chats longer than --block_size. keep: they go on in the next row, which begins without what came before. "
        "cut: to a row. drop: leave them out.",
    )
    document_boundary: Literal["reset", "carry"] = flag(
        "reset",
        "reset: memories and attention start anew with every document. "
        "carry: row b continues in row b of the next step and its memories are passed on.",
    )
    shuffle_buffer_size: int = flag(
        10_000, "Documents of a stream that are shuffled together; 1 keeps its order.", **COUNT
    )
    dataloader_num_workers: int = flag(
        0, "Batches that a background thread prepares ahead; 0: none.", least=0, most=1000
    )
    dataloader_pin_memory: bool = flag(True, "Copy batches to a GPU from page-locked memory.")


@dataclass
class OptimizationArguments:
    """How the weights change. Batch per optimizer step = per_device x accumulation x processes."""

    _argument_group_name = "optimization"

    max_train_steps: int | None = flag(
        None, "Optimizer steps in all; overrides --num_train_epochs. More steps continue a finished run.", **COUNT
    )
    num_train_epochs: float = flag(
        1.0,
        "Passes over the training data without --max_train_steps (default: 1; more for a small --train_file).",
        above=0,
    )
    per_device_train_batch_size: int = flag(
        8,
        "Rows per process and forward pass, in training and evaluation (default: 8; 4 for a small --train_file).",
        **ROWS,
    )
    gradient_accumulation_steps: int = flag(1, "Forward passes per optimizer step.", least=1, most=10_000)
    learning_rate: float = flag(
        3e-4,
        "Peak learning rate of the fastest level and of everything outside the levels (default: 3e-4; up to 2e-3 for "
        "a small --train_file).",
        above=0,
    )
    lr_scheduler_type: Literal[
        "linear", "cosine", "cosine_with_restarts", "cosine_with_min_lr", "polynomial", "constant",
        "constant_with_warmup", "inverse_sqrt", "warmup_stable_decay",
    ] = flag("cosine", "Schedule of the learning rate.")  # fmt: skip
    lr_scheduler_kwargs: str | None = flag(
        None, 'Settings of the schedule as a JSON object, such as {"min_lr_rate": 0.1} or {"num_decay_steps": 500}.'
    )
    lr_scheduler_steps: int | None = flag(
        None, "Steps of the schedule, warm-up included (default: those of the run).", **COUNT
    )
    num_warmup_steps: int | None = flag(
        None, "Linear warm-up in steps (default: a tenth of the schedule, at most 1,000).", **OR_NONE
    )
    weight_decay: float = flag(0.1, "Decoupled weight decay of matrices.", least=0)
    max_grad_norm: float = flag(1.0, "Clip the global gradient norm of each step to this; 0: do not clip.", least=0)
    optimizer: Literal[OPTIMIZERS] = flag(
        "adamw",
        "muon, m3 (the paper's, with a fast and a slow momentum) and delta_momentum update hidden matrices, AdamW all "
        "other parameters and the initial memories.",
    )
    level_optimizers: str | None = flag(
        None,
        "JSON object or file, keyed by CMS level: optimizer, lr_factor, betas, weight_decay. The clocks of several "
        "levels are level_periods in --config_overrides; they only delay, and cost 0.05 nats where measured.",
    )
    train_only: Literal["all", "memories"] = flag(
        "all", "memories: the memories alone learn, such as those of `hope-hf convert --memory_layers`."
    )
    lora_rank: int | None = flag(
        None, "Train LoRA matrices of this rank beside all linear layers, and nothing else; they are saved as PEFT's.",
        least=1, most=LONGEST,
    )  # fmt: skip
    lora_alpha: float | None = flag(None, "LoRA is scaled by this / rank (default: twice the rank).", above=0)
    vector_learning_rate: float | None = flag(
        None,
        "Peak learning rate of norms, biases and the kernel weights of convolutions (default: --learning_rate).",
        above=0,
    )
    adam_beta1: float = flag(0.9, "AdamW: decay of the first moment.", least=0, below=1)
    adam_beta2: float = flag(0.95, "AdamW: decay of the second moment.", least=0, below=1)
    adam_epsilon: float = flag(1e-8, "AdamW: added to the root of the second moment.", least=1e-30, most=1)


@dataclass
class RunArguments:
    """Where the run writes, and what it reports."""

    _argument_group_name = "run"

    output_dir: str | None = flag(None, "Folder of the run: weights, tokenizer, metrics.jsonl, checkpoint-<step>/.")
    dry_run: bool = flag(
        False, "Prepare everything, check the machine, take one step and write nothing; status 1 if a check fails."
    )
    seed: int = flag(42, "Seed of weights, data order and sampling.", **SEED)
    stop_after: str | None = flag(
        None, "Stop with a checkpoint after these steps, or this time, of this launch: 500, 90m, 11.5h."
    )
    eval_steps: int = flag(500, "Evaluate every N steps; 0: only at the end.", **OR_NONE)
    eval_on_start: bool = flag(False, "Evaluate before the first step as well.")
    logging_steps: int | None = flag(
        None,
        "Write a metrics row every N steps, and after the first and the last (default: 10; fewer in a run below 500 "
        "steps, so that it has 50 rows).",
        **COUNT,
    )
    report_to: str = flag("none", "Trackers besides metrics.jsonl: none, all, or comma-separated names (wandb,aim).")
    run_name: str | None = flag(
        None, "Name of the run in the trackers (default: WANDB_NAME, or the folder's name).", is_text=True
    )
    project_name: str | None = flag(
        None, "Project of the run in the trackers (default: WANDB_PROJECT, or hope_hf).", is_text=True
    )
    cpu_threads: int | None = flag(
        None, "Threads per process (default: OMP_NUM_THREADS, or free cores / processes on this machine).", **THREADS
    )
    profile_steps: str | None = flag(
        None, "Profile these steps, such as 10-12: a trace per process and a table of where their time went."
    )
    ram_report_steps: int = flag(
        0, "Write the RAM report every N steps, besides the start and the first step.", **OR_NONE
    )
    watchdog_seconds: float = flag(
        540.0,
        "Seconds without a step until every process writes its stacks to a file in --output_dir; 0: never.",
        least=0,
    )
    ddp_timeout: float = flag(1800.0, "Seconds after which a process gives up waiting for the others.", least=1)


@dataclass
class CheckpointArguments:
    """What is saved and uploaded, and how often."""

    _argument_group_name = "checkpoints and upload"

    checkpointing_steps: int = flag(
        500, "Write a resumable checkpoint every N steps; 0: only at SIGTERM and end.", **OR_NONE
    )
    save_total_limit: int = flag(2, "Checkpoints kept; older ones are removed.", **COUNT)
    keep_every: int | None = flag(
        None, "Keep the checkpoints of every N-th step for good, besides --save_total_limit.", **COUNT
    )
    keep_best: Literal["none", "eval/loss", "eval/accuracy"] = flag(
        "none", "Keep the model of the best evaluation in the folder best/ of --output_dir."
    )
    resume_from_checkpoint: str | None = flag(
        None,
        "A run's folder, one of its checkpoints, or 'latest' (in --output_dir): go on from there, also in another "
        "folder or with another rate, batch or schedule. The same command alone continues the run in --output_dir.",
    )
    ignore_data_skip: bool = flag(
        False,
        "With --resume_from_checkpoint of another run: read this command's text, from its first row on, with the "
        "checkpoint's weights, optimizer and schedule.",
    )
    async_save: bool = flag(False, "Write checkpoints while the training goes on, from a copy in the CPU's memory.")
    save_sharded: bool = flag(
        False, "Every process saves its own part of the weights; `checkpoints consolidate` joins them."
    )
    save_only_model: bool = flag(False, "Save the model alone: smaller checkpoints that no run can continue.")
    checkpoint_hook: str | None = flag(
        None,
        "Shell line run after each complete checkpoint, beside the training (HOPE_CHECKPOINT, HOPE_STEP).",
        is_text=True,
    )
    push_to_hub: bool = flag(False, "Upload the finished HOPE with its code and a model card; needs a login.")
    hub_model_id: str | None = flag(None, "Repository of the upload: owner/name (default: the folder's name).")
    hub_private_repo: bool = flag(False, "Make the repository private if the upload creates it.")


@dataclass
class MemoryArguments:
    """Flags that trade memory, speed and communication; the result stays, but for new weights by `--init sharded`."""

    _argument_group_name = "memory and speed"

    gradient_checkpointing: str = recomputing_flag()
    torch_compile: bool = flag(False, "Compile the model with torch.compile.")
    tf32: bool = flag(True, "CUDA only: TF32 matrix products; memory state, gates and solves stay fp32.")
    init: Literal["whole", "sharded"] = flag(
        "whole",
        "whole: every process first builds the whole model in its memory. "
        "sharded: none does, shards are filled block by block; new values are other random ones (FSDP, ZeRO-3).",
    )
    sync_each_batch: bool = flag(
        False, "FSDP: reduce gradients after every accumulated batch, so that none are held whole; sends more."
    )
    fsdp_reduce_dtype: Literal["float32", "bfloat16"] = flag(
        "float32", "FSDP in bf16 or fp16: dtype in which gradients are summed over processes."
    )
    fsdp_prefetch: int = flag(
        0, "FSDP version 2: blocks gathered ahead of the one that computes; 0: torch decides.", least=0, most=1000
    )
    fsdp_limit_all_gathers: bool = flag(True, "FSDP version 1: limit how far ahead parameters are gathered.")


@dataclass
class Arguments(
    RunArguments, ModelArguments, DataArguments, OptimizationArguments, CheckpointArguments, MemoryArguments
):
    """All flags of a run, flat.

    Attributes:
        demo: neither model nor data was named.
        defaults: by flag, the values that the size of the text chose (`hope_hf.common.defaults`), and why.
    """

    _argument_group_name = None

    demo: bool = False
    defaults: dict[str, Default] = field(default_factory=dict)

    # Flags that may change when a run is continued.
    FREE = frozenset(
        "output_dir resume_from_checkpoint ignore_data_skip checkpointing_steps save_total_limit keep_every keep_best "
        "async_save save_only_model save_sharded init checkpoint_hook dry_run stop_after eval_on_start "
        "per_device_train_batch_size gradient_accumulation_steps sync_each_batch gradient_checkpointing "
        "fsdp_limit_all_gathers fsdp_prefetch logging_steps eval_steps cpu_threads ddp_timeout watchdog_seconds "
        "ram_report_steps profile_steps report_to run_name project_name preprocessing_num_workers "
        "dataloader_num_workers dataloader_pin_memory trust_remote_code push_to_hub hub_model_id hub_private_repo "
        "demo defaults".split()
    )

    # Flags that name what may be moved or renamed: what is read there decides whether the run is the same.
    PLACES = frozenset(
        "train_file validation_file dataset_name dataset_config_name dataset_mixture train_shards "
        "tokenizer_name".split()
    )
    # Flags of the run's length: the same command with others continues it.
    LENGTH = frozenset(LENGTH)
    # All that decide the schedule.
    SCHEDULE = LENGTH | {"lr_scheduler_type", "lr_scheduler_kwargs", "lr_scheduler_steps", "num_warmup_steps"}
    # What --resume_from_checkpoint may change.
    CHANGEABLE = SCHEDULE | frozenset(
        "learning_rate vector_learning_rate weight_decay max_grad_norm adam_beta1 adam_beta2 adam_epsilon "
        "rows_per_step".split()
    )

    # What --ignore_data_skip may change: the text, and how it is read.
    TEXT = frozenset(
        "data text_column on_bad_rows validation_split_percentage max_train_samples max_eval_samples streaming "
        "shuffle_buffer_size assistant_only_loss long_chats".split()
    )

    def part(self, kind: type):
        """An object of a dataclass of options, a group or a narrower one, with the values of its flags."""
        return kind(**{field.name: getattr(self, field.name) for field in fields(kind)})

    @property
    def length_flag(self) -> str:
        """The flag that gives this run its length."""
        return "--num_train_epochs" if self.max_train_steps is None else "--max_train_steps"

    def changeable(self) -> frozenset[str]:
        """The keys of the identity that may differ from those of the run that is continued."""
        if self.resume_from_checkpoint is None:
            return self.LENGTH
        return self.CHANGEABLE | self.TEXT if self.ignore_data_skip else self.CHANGEABLE

    def rows_per_step(self, processes: int) -> int:
        """Rows of one optimizer step, over all processes and accumulated batches."""
        return self.per_device_train_batch_size * self.gradient_accumulation_steps * processes

    def identity(self) -> dict:
        """The flags that define the run, JSON-able: a folder with other values holds another run."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in self.FREE}


GROUPS = (
    RunArguments, ModelArguments, DataArguments, OptimizationArguments, CheckpointArguments, MemoryArguments
)  # fmt: skip
FLAGS = tuple(f.name for group in GROUPS for f in fields(group))


def check_block_size(block_size: int, config) -> None:
    """ValueError where rows of `--block_size` tokens are longer than the model's positions."""
    longest = getattr(config, "max_position_embeddings", None)
    if longest is not None and block_size > longest:
        raise ValueError(
            f"--block_size {block_size} is longer than the model's {longest} positions (max_position_embeddings): "
            "choose shorter blocks."
        )
