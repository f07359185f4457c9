"""The program as a user runs it: files, tables, exit statuses, one sentence per mistake."""

import io
import json
import os
import sys
import warnings
from contextlib import redirect_stdout
from pathlib import Path

import datasets
import pytest
import transformers
from huggingface_hub import constants

from hope_hf.common.results import markdown_table
from hope_hf.data import train_tokenizer
from hope_hf.evaluation import main
from hope_hf.evaluation.flags import FLAGS, parse_depths, parse_lengths, suite
from hope_hf.evaluation.suites import SUITES

SHORT = ["--suite", "sample", "--max_new_tokens", 1]


def evaluate(folder, text_file, *flags) -> int:
    flags = ["--validation_file", text_file, "--cpu_threads", "1", "--device", "cpu", *map(str, flags)]
    return main((["--model_name_or_path", folder] if folder else []) + flags)


def record_of(folder: Path) -> dict:
    return json.loads((folder / "results.json").read_text(), parse_constant=pytest.fail)


@pytest.fixture(scope="module")
def whole(folders, text_file, tmp_path_factory) -> tuple[Path, str]:
    """The folder of a report of four suites, and what the terminal showed."""
    output = tmp_path_factory.mktemp("report") / "eval"
    flags = ["--lengths", "160,300", "--depths", "0.5", "--samples_per_length", 2, "--max_new_tokens", 3]
    flags += ["--suite", "perplexity,passkey,memory,sample", "--limit", 2, "--output_dir", output]
    with redirect_stdout(io.StringIO()) as shown:
        assert evaluate(folders["hope"], text_file, *flags) == 0
    return output, shown.getvalue()


def test_a_whole_report(whole):
    output, shown = whole
    record = record_of(output)
    assert record["failed"] == {}
    assert (record["seed"], record["limit"], record["unfinished"]) == (42, 2, [])
    assert list(record["results"]) == ["perplexity", "passkey", "memory", "sample"]
    assert len(record["results"]["sample"]["samples"]["samples"]) == 2
    files = {"loss_by_position.png", "needle_passkey.png", "results.json", "results.md"}
    assert {path.name for path in output.iterdir()} == files
    # the summary comes last on the terminal and first on the page, every score beside chance
    assert shown.index("## perplexity") < shown.index("## summary")
    page = (output / "results.md").read_text()
    assert page.index("## summary") < page.index("## perp")
    rows = record["results"]["perplexity"]["summary"] + record["results"]["passkey"]["summary"]
    assert len(rows) == 6 and all(row["chance"] is not None for row in rows)
    (text,) = next(iter(record["results"]["perplexity"]["tables"].values()))
    # The first two documents, of which the second is longer than the longest length.
    assert text["documents"] == 2 and 300 < text["n"] < 2 * 300
    assert "--- 1, greedy\n" in shown and "--- 2, sampled\n" in shown


def test_another_causal_model_whose_config_holds_an_infinity(folders, text_file, tmp_path):
    options = ["--suite", "perplexity,sample", "--max_new_tokens", "2", "--lengths", "128", "--output_dir", tmp_path]
    assert evaluate(folders["mamba2"], text_file, *options) == 0
    record = record_of(tmp_path)
    assert record["model"]["config"]["model_type"] == "mamba2"
    (row,) = next(iter(record["results"]["perplexity"]["tables"].values()))
    assert all(row[f"{name}_stderr"] > 0 for name in ("loss", "perplexity", "bits_per_byte", "accuracy"))


def test_without_matplotlib_the_tables_are_written(folders, text_file, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.warns(UserWarning, match="matplotlib is not installed"):
        flags = ["--suite", "perplexity", "--lengths", "128", "--output_dir", tmp_path]
        assert evaluate(folders["llama"], text_file, *flags) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["results.json", "results.md"]


def test_samples_repeat_with_their_seed(folders, text_file, tmp_path, capsys):
    prompts = tmp_path / "prompts.txt"
    prompts.write_bytes("the memory\r\n\r\nof a\u2028model\r\n".encode())
    shown = []
    for seed in (1, 1, 2):
        options = ["--suite", "sample", "--prompts", prompts, "--max_new_tokens", 12, "--seed", seed]
        assert evaluate(folders["hope"], text_file, *options) == 0
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1] != shown[2] and "--- 2" in shown[0] and "--- 3" not in shown[0]


def test_offline_nothing_is_asked_of_the_hub(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    assert main(["owner/no-such-model", "--suite", "sample", "--offline"]) == 2
    assert transformers.utils.hub.is_offline_mode() and datasets.config.HF_HUB_OFFLINE


# Folders.


def test_a_report_is_never_overwritten(folders, text_file, tmp_path):
    (tmp_path / "results.json").write_text("{}")
    for _ in range(2):
        assert evaluate(folders["llama"], text_file, *SHORT, "--output_dir", tmp_path) == 0
    assert (tmp_path / "results.json").read_text() == "{}"
    assert len([json.loads(file.read_text()) for file in tmp_path.glob("*Z*/results.json")]) == 2
    assert not list(tmp_path.rglob("run.lock"))


def test_a_killed_evaluation_keeps_its_numbers_and_goes_on(folders, text_file, tmp_path, monkeypatch):
    @suite(*FLAGS)
    def killed(args, subject):
        assert "**perplexity has not ended yet**" in (tmp_path / "results.md").read_text()
        raise KeyboardInterrupt

    flags = [text_file, *SHORT, "--suite", "sample,perplexity", "--lengths", "128", "--output_dir", tmp_path]
    with monkeypatch.context() as patch:
        patch.setitem(SUITES, "perplexity", killed)
        assert evaluate(folders["llama"], *flags) == 130
    before = record_of(tmp_path)
    assert list(before["results"]) == ["sample"] and before["unfinished"] == ["perplexity"]
    # Another model's report is not continued.
    assert evaluate(folders["hope"], *flags) == 0
    assert record_of(tmp_path) == before
    with monkeypatch.context() as patch:
        patch.setitem(SUITES, "sample", suite(*FLAGS)(lambda args, subject: pytest.fail("it has run before")))
        assert evaluate(folders["llama"], *flags) == 0
    record = record_of(tmp_path)
    assert list(record["results"]) == ["sample", "perplexity"] and record["unfinished"] == []
    assert record["results"]["sample"] == before["results"]["sample"]


def test_any_error_of_a_suite_is_its_own_line(folders, text_file, tmp_path, capsys, monkeypatch):
    @suite(*FLAGS)
    def fails(args, subject):
        raise KeyError("ctx")

    monkeypatch.setitem(SUITES, "passkey", fails)
    flags = [*SHORT, "--suite", "passkey,sample", "--output_dir", tmp_path]
    assert evaluate(folders["llama"], text_file, *flags) == 1
    errors = capsys.readouterr().err
    assert errors.startswith("error: --suite passkey failed: KeyError: ") and errors.count("\n") == 1
    record = record_of(tmp_path)
    assert list(record["results"]) == ["sample"] and list(record["failed"]) == ["passkey"]
    assert not record["unfinished"]
    assert "**passkey could not run**" in (tmp_path / "results.md").read_text()
    # nothing is written where nothing ran
    assert evaluate(folders["llama"], text_file, "--suite", "memory", "--output_dir", tmp_path / "none") == 1
    assert not (tmp_path / "none").exists()


# Mistakes: flags, and words that the sentence has. `{tmp}` is a folder with the files below.
ERRORS = [
    (["--suite", "sampl"], "perplexity, passkey, needle"),
    (["--lengths", "1k,two"], "--lengths"),
    (["--lengths", "1k,99999999k"], "16,777,216"),
    (["--depths", "0,1.5"], "--depths"),
    (["--device", "tpu9"], "--device tpu9"),
    (["--lenghts", "1k"], "--lengths"),
    (["--train_shards", "x"], "--train_shards and --validation_file"),
    (["--prompts", "{tmp}/pipe"], "regular file"),
    (["--validation_file", "{tmp}/none.txt"], "none.txt does not exist"),
    (["--validation_file", "{tmp}/empty.txt"], "empty.txt is empty"),
    (["--validation_file", "{tmp}/blank.txt"], "--validation_file"),
    (["--model_name_or_path", "{tmp}/none"], "--model_name_or_path"),
    (["--tokenizer_name", "{tmp}/tokenizer"], "--tokenizer_name"),
    (["--output_dir", "{tmp}/blank.txt"], "--output_dir {tmp}/blank.txt is a file"),
    (["--model_name_or_path", "{gpt2}", "--max_new_tokens", "128"], "--max_new_tokens 128"),
    (["--checkpoints", "all"], "--output_dir"),
    (["--report_to", "aim", "--output_dir", "{tmp}/x"], "--report_to aim"),
    (["--compare", "{tmp}/blank.txt"], "--compare"),
]


def test_mistakes_are_one_sentence(folders, texts, text_file, tmp_path, capsys):
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "blank.txt").write_text(" \n")
    os.mkfifo(tmp_path / "pipe")
    train_tokenizer([*texts, "other words give other merges " * 9], 340).save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "run" / "checkpoint-1").mkdir(parents=True)
    places = {"tmp": str(tmp_path), "gpt2": folders["gpt2"]}
    for flags, words in ERRORS:
        flags = [flag.format(**places) for flag in flags]
        base = ["--model_name_or_path", f"{tmp_path}/run" if "--checkpoints" in flags else folders["hope"]]
        if "--validation_file" not in flags:
            base += ["--validation_file", text_file]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert main([*base, "--suite", "sample", *flags]) == 2, flags
        error = "".join(line for line in capsys.readouterr().err.splitlines(True) if "warning: " not in line)
        assert words.format(**places) in error and error.count("\n") == 1, (flags, error)


def test_lists_are_sorted_and_hold_a_number_once():
    assert parse_lengths("2k, 512,512") == [512, 2048]
    assert parse_depths("1,0.5,0") == [0.0, 0.5, 1.0]


def test_tables_are_aligned_and_errors_have_the_digits_of_their_values():
    rows = [
        {"name": "a", "n": 1234, "loss": 0.5, "loss_stderr": 0.25, "tiny": 1e-5},
        {"name": "bcd", "n": 1, "loss": 1234.5, "loss_stderr": None, "tiny": 0.0},
    ]
    assert markdown_table(rows).splitlines() == [
        "| name |     n |            loss |     tiny |",
        "| ---- | ----: | --------------: | -------: |",
        "| a    | 1,234 | 0.5000 ± 0.2500 | 1.00e-05 |",
        "| bcd  |     1 |         1,234.5 |   0.0000 |",
    ]
    cells = {(377.3, 14.5349): "377.3 ± 14.5", (0.0012, 8.47e-4): "0.0012 ± 0.0008", (0.5, 1e-6): "0.5000 ± 1.00e-06"}
    for (value, error), cell in cells.items():
        assert markdown_table([{"x": value, "x_stderr": error}]).splitlines()[-1] == f"| {cell} |"
