"""Runs on mixtures and shards: continued exactly, alike on one and two processes, refused in a sentence."""

import os
import re
import subprocess
import sys

import pytest
from training_runs import LLAMA, ROOT, curve, forget_the_end, read_rows

from hope_hf.data.prepare import main as prepare

SAVES = ["--checkpointing_steps", "2", "--eval_steps", "3", "--max_train_steps", "5", "--save_total_limit", "9"]


@pytest.fixture(scope="session")
def shards(corpus, tmp_path_factory):
    """The training and validation files of `corpus` as two corpora, prepared."""
    folder = tmp_path_factory.mktemp("mixed")
    mixture = folder / "mix.yaml"
    mixture.write_text(f"corpora: {{a: {{files: {corpus[1]}, weight: 0.7}}, b: {{files: {corpus[3]}, weight: 0.3}}}}")
    words = [str(mixture), "--tokenizer_name", corpus[5], "--output_dir", str(folder / "shards")]
    assert prepare([*words, "--validation_split_percentage", "10"]) == 0
    return folder / "shards"


def test_a_run_from_shards_continues_as_if_it_had_not_stopped(run, tmp_path, shards, capsys):
    data = ["--train_shards", str(shards)]
    status, whole = run("a", *SAVES, data=data)
    assert status == 0 and re.search(r"\(a (69|70)\.\d%, b (29|30)\.\d%\)", capsys.readouterr().out)
    forget_the_end(tmp_path / "a", 4, 5)
    status, continued = run("a", *SAVES, data=data)
    assert status == 0 and curve(continued) == curve(whole)
    assert curve(continued, "eval/loss") == curve(whole, "eval/loss")


def test_the_mixture_itself_gives_the_run_of_its_shards(run, shards, corpus):
    _, prepared = run("shards", *SAVES, data=["--train_shards", str(shards)])
    raw = ["--dataset_mixture", str(shards.parent / "mix.yaml"), "--tokenizer_name", corpus[5]]
    status, rows = run("raw", *SAVES, "--validation_split_percentage", "10", data=raw)
    assert status == 0 and curve(rows) == curve(prepared)


@pytest.mark.processes
def test_two_processes_read_what_one_reads(run, tmp_path, shards, warm_python):
    data = ["--train_shards", str(shards)]
    status, single = run("one", data=data)
    small = (
        "--block_size 32 --per_device_train_batch_size 2 --max_train_steps 8 --logging_steps 1 --learning_rate 5e-3"
    )
    # As from a wheel, which has no run_clm.py.
    launcher = ["-m", "accelerate.commands.launch", "--config_file", str(ROOT / "accelerate_configs/ddp.yaml")]
    launcher += ["--num_processes", "2", "-m", "hope_hf", "train"]
    command = [sys.executable, *launcher, *LLAMA, *data, *small.split(), "--cpu_threads", "1"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "ACCELERATE_USE_CPU": "true"}
    two = subprocess.run(
        [*command, "--output_dir", str(tmp_path / "two")], env=environment, capture_output=True, text=True, timeout=200
    )
    assert status == 0 and two.returncode == 0, two.stderr
    assert curve(read_rows(tmp_path / "two")) == pytest.approx(curve(single), rel=1e-5)


@pytest.mark.parametrize(
    "flags, sentence",
    [
        (
            ["--train_shards", "{shards}", "--train_file", "x"],
            "--train_file and --train_shards name the training text",
        ),
        (["--train_shards", "{shards}", "--streaming"], "--streaming is for --dataset_name and --train_file"),
        (["--train_shards", "{shards}", "--document_boundary", "carry"], "--document_boundary carry"),
        (["--train_shards", "{shards}/a"], "--train_shards {shards}/a has no manifest.json: finish it with hope-hf"),
        (
            ["--train_shards", "{shards}", "--tokenizer_name", "{other}"],
            "was made with another tokenizer than {other}",
        ),
        (["--dataset_mixture", "{shards}/mix.yaml"], "--dataset_mixture {shards}/mix.yaml cannot be read: No such fi"),
    ],
)
def test_what_does_not_fit_is_refused(run, tmp_path, shards, capsys, word_tokenizer, flags, sentence):
    word_tokenizer.save_pretrained(tmp_path / "other")
    names = {"shards": shards, "other": tmp_path / "other"}
    status, rows = run("a", data=[flag.format(**names) for flag in flags])
    assert status == 2 and rows == [] and not (tmp_path / "a").exists()
    assert sentence.format(**names) in capsys.readouterr().err


def test_flags_that_shards_ignore_are_named(run, shards):
    with pytest.warns(UserWarning, match="--max_train_samples is ignored: the shards are read whole"):
        status, _ = run(
            "a", "--max_train_samples", "3", "--max_train_steps", "1", data=["--train_shards", str(shards)]
        )
    assert status == 0
