"""The recipe that begins a command line; flags of transformers' `run_clm.py` that are renamed or ignored here."""

from collections.abc import Collection

from .names import OPTIMIZERS
from .parser import flag_of
from .process import warn_once
from .recipe import split_recipe
from .run_arguments import FLAGS

NO_EFFECT = {
    "do_train": "hope-hf train always trains",
    "do_eval": "hope-hf train always evaluates, every --eval_steps and at the end",
    "do_predict": "hope-hf eval measures a finished model",
    "overwrite_cache": "text that has changed is always read anew",
    "overwrite_output_dir": "a run in --output_dir is continued, and another one never overwritten",
    "with_tracking": "--report_to names the trackers",
    "per_device_eval_batch_size": "--per_device_train_batch_size applies to the evaluation, too",
    "use_slow_tokenizer": "AutoTokenizer chooses the kind",
    "use_fast_tokenizer": "AutoTokenizer chooses the kind",
    "keep_linebreaks": "texts always keep their line breaks",
    "low_cpu_mem_usage": "weights are always loaded without a second copy",
    "logging_first_step": "the first step is always logged",
    "remove_unused_columns": "only the column of the text is read",
    "disable_tqdm": "bars are drawn on terminals only",
}
INSTEAD = {
    "max_steps": "use --max_train_steps",
    "memory_dump_steps": "use --ram_report_steps",
    "warmup_steps": "use --num_warmup_steps",
    "warmup_ratio": "use --num_warmup_steps",
    "save_steps": "use --checkpointing_steps",
    "save_strategy": "use --checkpointing_steps",
    **dict.fromkeys(("load_best_model_at_end", "metric_for_best_model"), "use --keep_best eval/loss"),
    "logging_strategy": "use --logging_steps",
    "logging_dir": "metrics.jsonl and the trackers of --report_to are in --output_dir",
    "eval_strategy": "use --eval_steps",
    "evaluation_strategy": "use --eval_steps",
    "optim": f"use --optimizer {' or '.join(OPTIMIZERS)}",
    "project": "use --project_name",
    "data_seed": "--seed also seeds the data",
    "no_keep_linebreaks": "texts always keep their line breaks, so remove them in the file",
    "bf16": "set mixed_precision: bf16 in the launch file (accelerate launch --mixed_precision bf16)",
    "fp16": "set mixed_precision: fp16 in the launch file (accelerate launch --mixed_precision fp16)",
    "dtype": "weights are trained in float32; mixed_precision in the launch file sets the compute dtype",
    "torch_dtype": "weights are trained in float32; mixed_precision in the launch file sets the compute dtype",
    "fsdp": "choose a launch file, such as accelerate_configs/fsdp2.yaml",
    "fsdp_config": "choose a launch file, such as accelerate_configs/fsdp2.yaml",
    "deepspeed": "choose a launch file, such as accelerate_configs/deepspeed_zero3.yaml",
    "use_cpu": "set use_cpu: true in the launch file (accelerate launch --cpu)",
    "no_cuda": "set use_cpu: true in the launch file (accelerate launch --cpu)",
    **dict.fromkeys(
        ("device", "gpu", "gpus", "cuda", "cpu", "num_gpus", "n_gpu", "num_processes"),
        "the launch file chooses devices and processes (accelerate launch --cpu, --gpu_ids 0, --num_processes 2)",
    ),
    **dict.fromkeys(
        ("mixed_precision", "precision", "amp"),
        "set mixed_precision in the launch file (accelerate launch --mixed_precision bf16)",
    ),
    "cache_dir": "set the environment variable HF_HOME",
    "model_revision": "download it (hf download NAME --revision REVISION --local-dir DIR) and name the folder",
    "token": "log in with `hf auth login`",
    "hub_token": "log in with `hf auth login`",
}


def drop_foreign(words: list[str], flags: Collection[str] = ()) -> list[str]:
    """A command line without the flags that have no effect; each of them is warned of. `flags`: the program's own.

    Raises ValueError that names the replacement of a renamed flag.
    """
    kept, dropping = [], False
    for word in words:
        if word.startswith("--"):
            name = flag_of(word)
            if name in INSTEAD and name not in flags:
                raise ValueError(f"There is no flag --{name}: {INSTEAD[name]}.")
            dropping = name in NO_EFFECT
            if dropping:
                warn_once(f"--{name} has no effect: {NO_EFFECT[name]}.")
        if not dropping:
            kept.append(word)
    return kept


def split_run_recipe(argv: list[str], flags: Collection[str] = FLAGS) -> tuple[list[str], list[str]]:
    """The words of the recipe at the beginning, only those of `flags`, and the words after it.

    Raises ValueError for a key that is not a flag of `hope-hf train`, and for a renamed flag.
    """
    known = {*FLAGS, *NO_EFFECT, *INSTEAD}
    recipe, rest = split_recipe(argv, known, left_out={*FLAGS} - {*flags})
    return drop_foreign(recipe), drop_foreign(rest, flags)
