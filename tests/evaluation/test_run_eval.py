"""The program as a user runs it: files, tables, exit statuses, one sentence per mistake."""

import io
import json
import os
import sys
from contextlib import redirect_stdout
from pathlib import Path

import datasets
import pytest
import torch
import transformers
from huggingface_hub import constants
from transformers import AutoModelForCausalLM, AutoTokenizer

from hope_hf.common.folder_lock import FolderLock
from hope_hf.common.results import markdown_table
from hope_hf.data import DataConfig, train_tokenizer
from hope_hf.data.documents import open_sources
from hope_hf.evaluation import main, report
from hope_hf.evaluation.flags import FLAGS, Arguments, parse_depths, parse_lengths, suite
from hope_hf.evaluation.held_out import held_out_documents
from hope_hf.evaluation.result import SuiteResult
from hope_hf.evaluation.suites import SUITES

EXAMPLE = Path(__file__).parents[2] / "docs/examples/results.json"
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
    assert record["failed"] == {} and (record["seed"], record["limit"], record["unfinished"]) == (42, 2, [])
    assert list(record["results"]) == ["perplexity", "passkey", "memory", "sample"]
    assert len(record["results"]["sample"]["samples"]["samples"]) == 2
    files = {"loss_by_position.png", "needle_passkey.png", "results.json", "results.md"}
    assert {path.name for path in output.iterdir()} == files
    page = (output / "results.md").read_text()
    assert "limited to 2 samples" in page and "loss_by_position.png" in page
    # the summary comes last, every score beside chance
    assert shown.index("Suite 1 of 4: perplexity ...") < shown.index("## perplexity")
    assert shown[shown.rindex("## ") :].startswith("## summary") and page.index("## summary") < page.index("## perp")
    rows = [row for suite in ("perplexity", "passkey") for row in record["results"][suite]["summary"]]
    assert len(rows) == 6 and all(row["chance"] is not None for row in rows)
    (text,) = next(iter(record["results"]["perplexity"]["tables"].values()))
    # The first two documents, of which the second is longer than the longest length.
    assert text["documents"] == 2 and 300 < text["n"] < 2 * 300
    assert "--- 1, greedy\n" in shown and "--- 2, sampled\n" in shown


def test_the_example_has_the_keys_of_a_report(whole):
    def shape(record: dict, suites: list) -> list:
        columns = []
        for name in suites:
            columns += [list(rows[0]) for rows in record["results"][name]["tables"].values()]
        return [set(record), set(record["model"]), columns]

    example = json.loads(EXAMPLE.read_text())
    suites = list(example["results"])
    assert shape(example, suites) == shape(record_of(whole[0]), suites)
    # Flags may be added, and none of the example's is gone.
    assert set(example["config"]) <= set(FLAGS)


def test_another_causal_model_whose_config_holds_an_infinity(folders, text_file, tmp_path):
    options = ["--suite", "perplexity,sample", "--max_new_tokens", "2", "--lengths", "128", "--output_dir", tmp_path]
    assert evaluate(folders["mamba2"], text_file, *options) == 0
    record = record_of(tmp_path)
    assert record["model"]["config"]["model_type"] == "mamba2"
    (row,) = next(iter(record["results"]["perplexity"]["tables"].values()))
    assert all(row[f"{name}_stderr"] > 0 for name in ("loss", "perplexity", "bits_per_byte", "accuracy"))


def test_a_model_of_no_numbers_fails_its_suites_and_keeps_the_others(folders, text_file, tmp_path, capsys):
    model = AutoModelForCausalLM.from_pretrained(folders["llama"])
    with torch.no_grad():
        model.lm_head.weight.fill_(float("nan"))
    model.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(folders["llama"]).save_pretrained(tmp_path)
    assert evaluate(str(tmp_path), text_file, "--suite", "perplexity,passkey,sample", "--lengths", "160") == 1
    errors = capsys.readouterr().err.splitlines()
    assert [line.split(":")[1].strip() for line in errors] == ["perplexity", "passkey", "sample"]


def test_without_matplotlib_or_a_font_the_tables_are_written(folders, text_file, tmp_path, monkeypatch):
    flags = ["--suite", "perplexity", "--lengths", "128", "--output_dir"]

    def fails(*arguments):
        raise RuntimeError("no font")

    with monkeypatch.context() as patch, pytest.warns(UserWarning, match="loss_by_position.png .*no font"):
        patch.setattr("hope_hf.evaluation.perplexity.curves", fails)
        assert evaluate(folders["llama"], text_file, *flags, tmp_path / "font") == 0
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.warns(UserWarning, match="matplotlib is not installed"):
        assert evaluate(folders["llama"], text_file, *flags, tmp_path / "none") == 0
    for folder in ("font", "none"):
        assert sorted(path.name for path in (tmp_path / folder).iterdir()) == ["results.json", "results.md"]


def test_samples_repeat_with_their_seed(folders, text_file, tmp_path, capsys):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("the memory\n\nof a model\n")
    shown = []
    for seed in (1, 1, 2):
        options = ["--suite", "sample", "--prompts", prompts, "--max_new_tokens", 12, "--seed", seed]
        assert evaluate(folders["hope"], text_file, *options) == 0
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1] != shown[2] and "--- 2" in shown[0] and "--- 3" not in shown[0]


# Texts.


def documents(folder: Path) -> str:
    file = folder / "text.jsonl"
    file.write_text("".join(json.dumps({"text": f"document {index}"}) + "\n" for index in range(60)))
    return str(file)


def test_the_text_is_what_a_training_with_these_flags_holds_out(tmp_path):
    file = documents(tmp_path)
    held = {}
    for share in (5.0, 50.0):
        flags = {"train_file": file, "validation_split_percentage": share}
        held[share] = held_out_documents(Arguments(**flags)).texts
        assert held[share] == open_sources(DataConfig(**flags)).validation["text"][:]
    assert set(held[5.0]) < set(held[50.0])
    for limit in (None, 2):
        flags = {"train_file": file, "streaming": True, "validation_split_percentage": 20.0, "max_eval_samples": limit}
        streamed = held_out_documents(Arguments(**flags))
        assert streamed.texts == open_sources(DataConfig(**flags)).validation["text"][:] and file in streamed.source


def test_the_text_of_a_run_of_several_files_is_found(tmp_path):
    rows = [f"document {index}" for index in range(60)]
    for name, some in (("a.csv", rows[:30]), ("b.csv", rows[30:])):
        (tmp_path / name).write_text("id,body,title\n" + "".join(f"{text[9:]},{text},t\n" for text in some) + "1,2\n")
    files = [str(tmp_path / "a.csv"), str(tmp_path / "b.csv")]
    flags = {"train_file": files, "text_column": "body", "on_bad_rows": "skip"}
    (tmp_path / "run.json").write_text(json.dumps({"identity": flags}))
    with pytest.warns(UserWarning, match="2 of 62 rows"):
        held = held_out_documents(Arguments(model_name_or_path=str(tmp_path)))
        assert held.texts == open_sources(DataConfig(**flags)).validation["text"][:] and held.texts[0] in rows


def test_offline_nothing_is_asked_of_the_hub(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    assert main(["--suite", "sample", "--offline"]) == 2
    assert transformers.utils.hub.is_offline_mode() and datasets.config.HF_HUB_OFFLINE


# Folders.


def test_a_suite_that_cannot_run_leaves_the_others(folders, text_file, tmp_path, capsys):
    output = tmp_path / "report"
    assert evaluate(folders["llama"], text_file, *SHORT, "--suite", "memory,sample", "--output_dir", output) == 1
    assert "--suite memory" in capsys.readouterr().err
    record = record_of(output)
    assert list(record["failed"]) == ["memory"] and list(record["results"]) == ["sample"]
    assert "**memory could not run**" in (output / "results.md").read_text()
    # nothing is written where nothing ran
    assert evaluate(folders["llama"], text_file, "--suite", "memory", "--output_dir", tmp_path / "none") == 1
    assert not (tmp_path / "none").exists()


def test_a_report_is_never_overwritten(folders, text_file, tmp_path):
    (tmp_path / "results.json").write_text("{}")
    for _ in range(2):
        assert evaluate(folders["llama"], text_file, *SHORT, "--output_dir", tmp_path) == 0
    assert (tmp_path / "results.json").read_text() == "{}"
    assert len([json.loads(file.read_text()) for file in tmp_path.glob("*Z*/results.json")]) == 2
    assert not list(tmp_path.rglob("run.lock"))


def test_another_evaluation_in_the_folder_is_left_alone(folders, text_file, tmp_path):
    lock = FolderLock(tmp_path)
    lock.acquire()
    assert evaluate(folders["llama"], text_file, *SHORT, "--output_dir", tmp_path) == 0
    lock.release()
    assert len(list(tmp_path.glob("*Z/results.json"))) == 1 and not (tmp_path / "results.json").exists()


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


@pytest.mark.parametrize("error", [AssertionError("x"), KeyError("ctx"), OSError(28, "full")])
def test_any_error_of_a_suite_is_its_own_line(folders, text_file, tmp_path, capsys, monkeypatch, error):
    @suite(*FLAGS)
    def fails(args, subject):
        raise error

    monkeypatch.setitem(SUITES, "passkey", fails)
    flags = [*SHORT, "--suite", "passkey,sample", "--output_dir", tmp_path]
    assert evaluate(folders["llama"], text_file, *flags) == 1
    errors = capsys.readouterr().err
    assert errors.startswith(f"error: --suite passkey failed: {type(error).__name__}: ") and errors.count("\n") == 1
    record = record_of(tmp_path)
    assert list(record["results"]) == ["sample"] and list(record["failed"]) == ["passkey"] and not record["unfinished"]


# Mistakes: flags, and words that the sentence has. `{tmp}` is a folder with the files below.
ERRORS = [
    (["--suite", "sampl"], "perplexity, passkey, needle"),
    (["--suite", ","], "--suite"),
    (["--lengths", "1k,two"], "--lengths"),
    (["--lengths", "0"], "--lengths"),
    (["--lengths", "1k,99999999k"], "16,777,216"),
    (["--lengths", "9" * 5000], "--lengths"),
    (["--depths", "0,1.5"], "--depths"),
    (["--depths", "0,nan,1"], "--depths"),
    (["--device", "tpu9"], "--device tpu9"),
    (["--device", "meta"], "--device meta"),
    (["--lenghts", "1k"], "--lengths"),
    (["--train_shards", "x"], "--train_shards and --validation_file"),
    (["--dataset_mixture", "x.yaml"], "--dataset_mixture and --validation_file"),
    (["--prompts", "{tmp}/pipe"], "regular file"),
    (["--prompts", "{tmp}/empty.txt"], "--prompts"),
    (["--prompts", "{tmp}/none"], "--prompts"),
    (["--validation_file", "{tmp}/none.txt"], "none.txt does not exist"),
    (["--validation_file", "{tmp}/empty.txt"], "empty.txt is empty"),
    (["--validation_file", "{tmp}/blank.txt"], "--validation_file"),
    (["--model_name_or_path", "{tmp}/none"], "--model_name_or_path"),
    (["--tokenizer_name", "{tmp}/tokenizer"], "--tokenizer_name"),
    (["--output_dir", "{tmp}/blank.txt"], "--output_dir {tmp}/blank.txt is a file"),
    (["--output_dir", "{tmp}/blank.txt/report"], "--output_dir {tmp}/blank.txt/report"),
    (["--model_name_or_path", "{gpt2}", "--max_new_tokens", "128"], "--max_new_tokens 128"),
    (["--checkpoints", "all"], "--output_dir"),
    (["--checkpoints", "some", "--output_dir", "{tmp}/x"], "--checkpoints"),
    (["--report_to", "wandb"], "--report_to"),
    (["--report_to", "aim", "--output_dir", "{tmp}/x"], "--report_to aim"),
    (["--compare", "{tmp}/blank.txt"], "--compare"),
]


@pytest.fixture(scope="module")
def mistaken(folders, texts, tmp_path_factory) -> dict[str, str]:
    """The names in `ERRORS`."""
    tmp = tmp_path_factory.mktemp("mistakes")
    (tmp / "empty.txt").write_text("")
    (tmp / "blank.txt").write_text(" \n")
    os.mkfifo(tmp / "pipe")
    train_tokenizer([*texts, "other words give other merges " * 9], 340).save_pretrained(tmp / "tokenizer")
    (tmp / "run" / "checkpoint-1").mkdir(parents=True)
    return {"tmp": str(tmp), "gpt2": folders["gpt2"]}


@pytest.mark.parametrize(("flags", "words"), ERRORS)
def test_mistakes_are_one_sentence(folders, text_file, mistaken, flags, words, capsys):
    flags = [flag.format(**mistaken) for flag in flags]
    base = ["--model_name_or_path", f"{mistaken['tmp']}/run" if "--checkpoints" in flags else folders["hope"]]
    if "--validation_file" not in flags:
        base += ["--validation_file", text_file]
    assert main([*base, "--suite", "sample", *flags]) == 2
    error = capsys.readouterr().err
    assert words.format(**mistaken) in error and error.count("\n") == 1


def test_a_full_disk_is_one_sentence(tmp_path, capsys, monkeypatch):
    def write(file, text):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(report, "replace_text", write)
    report.Report(Arguments(output_dir=str(tmp_path)), ["sample"]).add("sample", SuiteResult())
    assert capsys.readouterr().err == f"error: --output_dir {tmp_path} cannot be written: No space left on device.\n"


def test_lists():
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
