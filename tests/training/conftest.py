"""A small corpus, its tokenizer, runs of the trainer inside the test's process, and checkpoints."""

import io
import json
import random
import shutil
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch
from accelerate import PartialState
from checkpoint_run import Run
from engine_runs import Launches
from safetensors.torch import load_file, save_file
from training_process import Finished, reset_accelerate, training_process
from training_runs import EVERY_FOURTH, HOPE, LLAMA, make_tokenizer, read_rows
from transformers import AutoConfig, AutoModelForCausalLM

from hope_hf.data.prepare import main as prepare
from hope_hf.training import finish, main
from hope_hf.training.watch.plot import draw_curves


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> list[str]:
    """Flags that name a training file, a validation file and a tokenizer; documents of a small language."""
    folder = tmp_path_factory.mktemp("corpus")
    generator = random.Random(0)
    words = ["".join(generator.choices("abcdefghij", k=generator.randint(2, 7))) for _ in range(60)]
    documents = [" ".join(generator.choices(words, k=generator.randint(20, 80))) for _ in range(120)]
    # Few to evaluate on: at the end of every run that takes longer than its steps.
    for name, part in (("train", documents[:100]), ("validation", documents[112:])):
        lines = "".join(json.dumps({"text": text}) + "\n" for text in part)
        (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    make_tokenizer(documents).save_pretrained(folder / "tokenizer")
    return [
        "--train_file", str(folder / "train.jsonl"), "--validation_file", str(folder / "validation.jsonl"),
        "--tokenizer_name", str(folder / "tokenizer"),
    ]  # fmt: skip


@pytest.fixture(scope="session")
def shards(corpus, tmp_path_factory) -> list[str]:
    """Flags that name the training and validation files of `corpus` as two corpora, prepared."""
    folder = tmp_path_factory.mktemp("mixed")
    mixture = folder / "mix.yaml"
    mixture.write_text(f"corpora: {{a: {{files: {corpus[1]}, weight: 0.7}}, b: {{files: {corpus[3]}, weight: 0.3}}}}")
    words = [str(mixture), "--tokenizer_name", corpus[5], "--output_dir", str(folder / "shards")]
    assert prepare([*words, "--validation_split_percentage", "10"]) == 0
    return ["--train_shards", str(folder / "shards")]


@pytest.fixture(scope="session")
def base_model(tmp_path_factory) -> Path:
    """A model in bfloat16 whose files lack the head's prefix, as those of base models on the Hub."""
    folder = tmp_path_factory.mktemp("base")
    config = AutoConfig.for_model("gpt2", vocab_size=300, n_embd=32, n_layer=2, n_head=2)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    stripped = {name.removeprefix("transformer."): tensor for name, tensor in weights.items()}
    save_file(stripped, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="session")
def launched(tmp_path_factory, corpus, shards, base_model) -> Launches:
    """`launched(engine)`: what a launch of accelerate_configs/ has left, made once for all tests.

    Tests that use it are on one worker of pytest-xdist: `xdist_group("engines")`.
    """
    texts = {"shards": shards, "loaded": ["--model_name_or_path", str(base_model), *corpus]}
    return Launches(tmp_path_factory, corpus, texts)


def train(folder: Path, data: list[str], *flags, model: list[str]) -> tuple[int, list[dict]]:
    """Train in this process for 8 steps, if the flags name no other number; the exit status and the rows."""
    reset_accelerate()
    small = ["--block_size", "32", "--per_device_train_batch_size", "4", "--logging_steps", "1"]
    small += ["--learning_rate", "5e-3", "--cpu_threads", "1"]
    small += [] if "--num_train_epochs" in flags else ["--max_train_steps", "8"]
    status = main([*model, *data, *small, "--output_dir", str(folder), *map(str, flags)])
    return status, read_rows(folder)


@pytest.fixture
def run(tmp_path, corpus):
    """`run(name, *flags, model=LLAMA)` trains in `tmp_path/name` on the corpus and returns (exit status, rows)."""
    with training_process() as patch:
        patch.setattr(finish, "draw_curves", lambda *arguments: None)
        yield lambda name, *flags, model=LLAMA, data=corpus: train(tmp_path / name, data, *flags, model=model)


@pytest.fixture(scope="session")
def trained(tmp_path_factory, corpus):
    """`trained("hope")` or `trained("llama")`: a finished run, made once; `EVERY_FOURTH` are its flags."""
    runs = {}

    def of(kind: str) -> Finished:
        if kind not in runs:
            folder, printed = tmp_path_factory.mktemp("trained") / kind, io.StringIO()
            model = {"hope": HOPE, "llama": LLAMA}[kind]
            with training_process() as patch, redirect_stdout(printed):
                # The test that is the first to ask may have left the picture out.
                patch.setattr(finish, "draw_curves", draw_curves)
                status, rows = train(folder, corpus, *EVERY_FOURTH, model=model)
            assert status == 0
            runs[kind] = Finished(folder, rows, printed.getvalue())
        return runs[kind]

    return of


@pytest.fixture
def fresh_accelerate():
    reset_accelerate()
    yield
    reset_accelerate()


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
