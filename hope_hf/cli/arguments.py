"""Flags that several programs have, named as in transformers' ``run_clm.py``."""

from dataclasses import dataclass, field
from functools import partial

from .bounds import Bounds, Checked

# Bounds that several flags share.
COUNT = {"least": 1}
OR_NONE = {"least": 0}
THREADS = {"least": 1, "most": 1024}
ROWS = {"least": 1, "most": 65_536}
# numpy's seeds end at 2^32 - 1, and every process adds its rank.
SEED = {"least": 0, "most": 4_000_000_000}


def flag(default, help: str, **bounds):
    """The dataclass field of a flag: default (MISSING: required), `--help` line and, for a number, `Bounds`.

    The parser calls `Checked` with every value that it reads.
    """
    if isinstance(default, bool):
        return field(default=default, metadata={"help": help})
    limits = Bounds(**bounds) if bounds else None
    shown = f"{help} [{limits.words().removeprefix('of ')}]" if limits else help
    return field(default=default, metadata={"help": shown, "action": partial(Checked, bounds=limits)})


@dataclass
class ModelArguments:
    """Which model is trained. Without any of them: a new HOPE of the size `tiny`."""

    _argument_group_name = "model"

    model_name_or_path: str | None = flag(None, "Start from these weights (folder or Hub name) instead of new ones.")
    model_type: str | None = flag(None, "Architecture of a new model: hope (default) or any other causal LM.")
    config_name: str | None = flag(None, "Config of a new model: folder, Hub name, or HOPE size (tiny, pilot, ...).")
    config_overrides: str | None = flag(
        None, "Fields of a new model's config: 'hidden_size=256,num_hidden_layers=4' or a JSON object."
    )
    tokenizer_name: str | None = flag(None, "Tokenizer, if not the model's own (folder or Hub name).")
    trust_remote_code: bool = flag(False, "Allow model code from the Hub to run on this machine.")
    attn_implementation: str | None = flag(None, "Attention kernel: sdpa, eager, flash_attention_2, ...")


@dataclass
class TextArguments:
    """Which text is read. Without a data set or file: the built-in corpus."""

    _argument_group_name = "data"

    dataset_name: str | None = flag(None, "Hub name or folder of a data set; 'synthetic' gives seeded random tokens.")
    dataset_config_name: str | None = flag(None, "Configuration of that data set.")
    train_file: str | None = flag(None, "Training text: .txt, .json, .jsonl or .parquet; a glob pattern is allowed.")
    dataset_mixture: str | None = flag(None, "Several corpora in shares: a YAML file, see docs/data.md.")
    train_shards: str | None = flag(None, "Folder of token shards that python -m hope_hf.data.prepare wrote.")
    validation_file: str | None = flag(None, "Validation text, of the same kinds.")
    validation_split_percentage: float = flag(
        5.0, "Percentage of the training documents held out if there is no validation set.", above=0, below=100
    )
    max_train_samples: int | None = flag(None, "Use only the first N training documents.", **COUNT)
    max_eval_samples: int | None = flag(None, "Use only the first N validation documents.", **COUNT)
    streaming: bool = flag(False, "Read the data set as a stream; training needs --max_train_steps.")
    preprocessing_num_workers: int | None = flag(None, "Processes that tokenize.", **THREADS)
