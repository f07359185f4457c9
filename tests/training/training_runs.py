"""Small models for tests, and the output of runs."""

import itertools
import json
import math
import shutil
import socket
from pathlib import Path

import torch
from accelerate.utils import DistributedType
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from transformers import PreTrainedTokenizerFast

from hope_hf.common.results import IGNORED
from hope_hf.training import trainer
from hope_hf.training.engines import choose

ROOT = Path(__file__).parents[2]
# After `sys.executable`, which the fixture `warm_python` changes.
TWO = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
LLAMA = [
    "--model_type", "llama", "--config_overrides",
    "hidden_size=32,intermediate_size=64,num_hidden_layers=2,num_attention_heads=2,num_key_value_heads=2",
]  # fmt: skip
GPT2 = [
    "--model_type", "gpt2", "--config_overrides",
    "n_embd=32,n_layer=2,n_head=2,n_positions=64,resid_pdrop=0,embd_pdrop=0,attn_pdrop=0",
]  # fmt: skip
HOPE = [
    "--config_overrides",
    "hidden_size=64,num_hidden_layers=2,level_intermediate_sizes=[32,32],level_periods=[256,512],"
    "memory_chunk_size=8",
]  # fmt: skip
HOPE_ATTENTION = [HOPE[0], HOPE[1] + ",layer_types=[full_attention,full_attention]"]
# All blocks that are read are forced: a rounding error selects no other.
SPARSE = "sparse_block_size=8,sparse_compress_stride=4,sparse_top_k=3,sparse_window=8"
THREE_LAYERS = HOPE[1].replace("num_hidden_layers=2", "num_hidden_layers=3")
RETAINING = "sliding_window=8,attention_sinks=2,retained_block_size=4"
HOPE_SPARSE = [
    HOPE[0], f"{THREE_LAYERS},layer_types=[hope_memory,sparse_attention,retaining_attention],{SPARSE},{RETAINING}"
]
HOPE_HYBRID = [HOPE[0], f"{THREE_LAYERS},layer_types=[hope_memory,full_attention,retaining_attention],{RETAINING}"]

# With these a run has its checkpoints 4 and 8, and the fixture `trained` its flags.
EVERY_FOURTH = ["--checkpointing_steps", "4", "--eval_steps", "4", "--save_total_limit", "9"]


def fp16_on_cpu(patch, **scaler):
    """What accelerate sets up for `mixed_precision: fp16` on a GPU: autocast, and a scaler with the options `scaler`.

    DeepSpeed does not need it.
    """
    make = choose.cpu_accelerator

    def with_scaler(wanted: str, options: dict):
        accelerator = make(wanted, options)
        if wanted != "deepspeed":
            fsdp1 = accelerator.distributed_type == DistributedType.FSDP and not accelerator.is_fsdp2
            accelerator.native_amp = True
            accelerator.scaler = (ShardedGradScaler if fsdp1 else torch.amp.GradScaler)("cpu", **scaler)
        return accelerator

    patch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    patch.setattr(choose, "cpu_accelerator", with_scaler)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def read_rows(folder: Path) -> list[dict]:
    file = folder / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def curve(rows: list[dict], key: str = "train/loss") -> list[float]:
    return [row[key] for row in rows if key in row]


def forget_the_end(folder, *steps):
    """Put a finished run back to its state before `steps` were saved, as after a kill."""
    for step in steps:
        shutil.rmtree(folder / f"checkpoint-{step}")
    record = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**record, "complete": False}))


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


def change_losses(patch, change):
    """`change(count, loss)` instead of every batch's loss in the next run, counted from 1."""
    counts, summed_loss = itertools.count(1), trainer.summed_loss
    patch.setattr(trainer, "summed_loss", lambda *arguments: change(next(counts), summed_loss(*arguments)))


def no_number(*counts: int):
    """For `change_losses`: these losses are not finite."""
    return lambda count, loss: loss * math.nan if count in counts else loss


def mask_steps(patch, *steps: int):
    """Every label of these steps of the next run, counted from 1, is masked: they have no token to learn."""
    read, calls = trainer._read, []

    def masked(*given):
        window, state = read(*given)
        calls.append(window)
        if len(calls) in steps:
            window = [batch | {"labels": torch.full_like(batch["labels"], IGNORED)} for batch in window]
        return window, state

    patch.setattr(trainer, "_read", masked)


def same_tensors(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(first[name], second[name]) for name in first)


def parts_of_checkpoint(folder: Path, step: int) -> dict[str, torch.Tensor]:
    """Weights and optimizer state of a checkpoint, by name."""
    files = ("model.safetensors", "optimizer_rank_0.safetensors")
    own = [load_file(folder / f"checkpoint-{step}" / file) for file in files]
    return own[0] | own[1]
