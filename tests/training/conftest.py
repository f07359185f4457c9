"""A small corpus, its tokenizer, runs of the trainer inside the test's process, and checkpoints."""

import json
import random
import shutil
from pathlib import Path

import pytest
import torch
from accelerate import PartialState
from checkpoint_run import Run
from training_runs import LLAMA, make_tokenizer, read_rows, reset_accelerate

from hope_hf.training import finish, main


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> list[str]:
    """Flags that name a training file, a validation file and a tokenizer; 120 documents of a small language."""
    folder = tmp_path_factory.mktemp("corpus")
    generator = random.Random(0)
    words = ["".join(generator.choices("abcdefghij", k=generator.randint(2, 7))) for _ in range(60)]
    documents = [" ".join(generator.choices(words, k=generator.randint(20, 80))) for _ in range(120)]
    for name, part in (("train", documents[:100]), ("validation", documents[100:])):
        lines = "".join(json.dumps({"text": text}) + "\n" for text in part)
        (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    make_tokenizer(documents).save_pretrained(folder / "tokenizer")
    return [
        "--train_file", str(folder / "train.jsonl"), "--validation_file", str(folder / "validation.jsonl"),
        "--tokenizer_name", str(folder / "tokenizer"),
    ]  # fmt: skip


@pytest.fixture
def run(tmp_path, corpus, monkeypatch):
    """`run(name, *flags, model=LLAMA)` trains in `tmp_path/name` on the corpus and returns (exit status, rows)."""
    threads = torch.get_num_threads()
    # The full sample at the end would take longer than the training.
    monkeypatch.setattr(finish, "SAMPLE_TOKENS", 4)

    def start(name: str, *flags, model=LLAMA, data=corpus):
        reset_accelerate()
        folder = tmp_path / name
        small = ["--block_size", "32", "--per_device_train_batch_size", "4", "--logging_steps", "1"]
        small += ["--learning_rate", "5e-3", "--cpu_threads", "1"]
        small += [] if "--num_train_epochs" in flags else ["--max_train_steps", "8"]
        status = main([*model, *data, *small, "--output_dir", str(folder), *map(str, flags)])
        return status, read_rows(folder)

    yield start
    reset_accelerate()
    torch.set_num_threads(threads)
    torch.set_flush_denormal(False)


@pytest.fixture
def one_cpu_process():
    PartialState(cpu=True)


@pytest.fixture(scope="session")
def written(tmp_path_factory):
    """An output folder with checkpoints of steps 3 and 5; tests copy it."""
    PartialState(cpu=True)
    output_dir = tmp_path_factory.mktemp("written")
    run = Run()
    run.train(3)
    run.save(output_dir)
    run.train(2)
    run.save(output_dir)
    return output_dir


@pytest.fixture
def output_dir(written, tmp_path):
    return Path(shutil.copytree(written, tmp_path / "run", symlinks=True))
