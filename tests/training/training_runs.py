"""Models small enough for tests, and what a run left behind."""

import json
from pathlib import Path

from accelerate.state import AcceleratorState, GradientState
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

LLAMA = [
    "--model_type", "llama", "--config_overrides",
    "hidden_size=32,intermediate_size=64,num_hidden_layers=2,num_attention_heads=2,num_key_value_heads=2",
]  # fmt: skip
HOPE = [
    "--config_overrides",
    "hidden_size=64,num_hidden_layers=2,level_intermediate_sizes=[32,32],level_periods=[256,512],"
    "memory_chunk_size=8,projection_chunk_size=16",
]  # fmt: skip


def reset_accelerate():
    """accelerate keeps its state in the process: the next run in it would inherit the last one's."""
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def read_rows(folder: Path) -> list[dict]:
    file = folder / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def curve(rows: list[dict], key: str = "train/loss") -> list[float]:
    return [row[key] for row in rows if key in row]


def make_tokenizer(texts: list[str], vocab_size: int = 300) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>")
