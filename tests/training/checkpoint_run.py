"""A tiny training whose whole state is written quickly, and ways to damage its files."""

import json
import random
from pathlib import Path

import numpy as np
import torch
from accelerate import PartialState
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, get_scheduler

from hope_hf.optim import build_optimizer
from hope_hf.training.checkpoints.manifest import LATEST, seal
from hope_hf.training.checkpoints.optimizer import load_optimizer
from hope_hf.training.checkpoints.reader import find_checkpoint
from hope_hf.training.checkpoints.state_files import restore_rng, rng_state
from hope_hf.training.checkpoints.weights import load_weights
from hope_hf.training.checkpoints.writer import CheckpointWriter
from hope_hf.training.engines.base import Engine

CONFIG = dict(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    attention_dropout=0.1,
    pad_token_id=0,
)


MARK = "0123456789ab"
"""The run's random id."""
DATA = {"rows": 8, "positions": [3, 5]}


class Run:
    """A tiny training with dropout, a level that steps every fourth time, and data drawn from three generators."""

    def __init__(self, seed: int = 0, **changes):
        torch.manual_seed(seed)
        self.model = LlamaForCausalLM(LlamaConfig(**CONFIG | changes))
        # A slow level in a model that has none.
        self.model.model.layers[1].mlp.level, self.model.model.layers[1].mlp.period = 0, 400
        self.optimizer = build_optimizer(self.model, "muon", 1e-2, 0.1, (0.9, 0.95), 1e-8, tokens_per_step=100)
        self.engine = Engine().adopt(self.model, self.optimizer)
        self.scheduler = get_scheduler("cosine", self.optimizer, num_warmup_steps=2, num_training_steps=50)
        words = pre_tokenizers.Whitespace()
        tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "hope": 1}, unk_token="<unk>"))
        tokenizer.pre_tokenizer = words
        self.tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")
        self.step = 0

    def train(self, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            offset = random.randrange(4) + int(np.random.randint(4))
            tokens = (torch.randint(24, (2, 12)) + offset) % 32
            loss = self.model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            self.step += 1
            losses.append(loss.item())
        return losses

    def save(self, output_dir: Path, save_total_limit: int | None = None, **changes) -> Path:
        # A run makes its folder before its first checkpoint.
        if PartialState().is_main_process and not Path(output_dir).is_dir():
            Path(output_dir).mkdir(parents=True)
        return self.save_with(CheckpointWriter(output_dir, save_total_limit, mark=MARK), **changes)

    def save_with(
        self, writer: CheckpointWriter, background: bool = False, data: object = DATA, carried: dict | None = None
    ) -> Path:
        pieces = {
            "engine": self.engine,
            "tokenizer": self.tokenizer,
            "state": {
                "scheduler": self.scheduler.state_dict(),
                "trainer": {"step": self.step, "loss_sum": 0.1 + 0.2, "best": None},
                "rank": {"rng": rng_state(), "data": data, "carried": carried or {}},
            },
        }
        return writer.save(self.step, **pieces, background=background)

    def restore(self, output_dir: Path, choice: str | None = None):
        saved = find_checkpoint(output_dir, choice)
        load_weights(self.model, saved.manifest)
        load_optimizer(saved.manifest, self.engine)
        self.scheduler.load_state_dict(saved.state["scheduler"])
        if saved.state["rank"]["rng"] is not None:
            restore_rng(saved.state["rank"]["rng"])
        self.step = saved.step
        return saved


def names(folder: Path) -> list[str]:
    """All but the link to the newest checkpoint."""
    return sorted(path.name for path in folder.iterdir() if path.name != LATEST)


def contents(folder: Path) -> dict[str, bytes]:
    """All files but the manifest, which has the time."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "manifest.json"}


def truncate(path: Path):
    with path.open("r+b") as handle:
        handle.truncate(path.stat().st_size - 1)


def forge(folder: Path, **fields):
    """Put `fields` into a checkpoint's manifest, None takes one away, and seal it as if `publish` had."""
    file = folder / "manifest.json"
    content = json.loads(file.read_text()) | fields
    content = {name: value for name, value in content.items() if value is not None and name != "sha256"}
    file.write_text(json.dumps({**content, "sha256": seal(content)}))
