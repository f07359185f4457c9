"""The program as a user runs it: files, tables, exit statuses, one sentence per mistake."""

import json
import os
import sys
from functools import partial

import datasets
import pytest
import torch
import transformers
from huggingface_hub import constants

from hope_hf.common.folder_lock import FolderLock
from hope_hf.common.results import markdown_table
from hope_hf.data import DataConfig
from hope_hf.data.documents import open_sources
from hope_hf.evaluation import main, report
from hope_hf.evaluation.flags import FLAGS, Arguments, parse, parse_depths, parse_lengths, suite
from hope_hf.evaluation.held_out import held_out_documents
from hope_hf.evaluation.result import SuiteResult
from hope_hf.evaluation.suites import SUITES


def evaluate(folder, text_file, *flags) -> int:
    flags = ["--validation_file", text_file, "--cpu_threads", "1", "--device", "cpu", *map(str, flags)]
    return main((["--model_name_or_path", folder] if folder else []) + flags)


def test_a_whole_report(folders, text_file, tmp_path, capsys):
    output = tmp_path / "report"
    status = evaluate(
        folders["hope"], text_file, "--suite", "perplexity,passkey,memory,sample", "--lengths", "160,300", "--depths",
        "0.5", "--samples_per_length", "2", "--max_new_tokens", "3", "--limit", "2", "--output_dir", output,
    )  # fmt: skip
    shown = capsys.readouterr().out
    assert status == 0
    record = json.loads((output / "results.json").read_text())
    assert record["schema_version"] == 1 and record["failed"] == {} and record["seed"] == 42 and record["limit"] == 2
    assert record["model"]["type"] == "hope" and record["config"]["suite"].startswith("perplexity")
    assert record["versions"]["torch"] and record["git"] and record["command"] and record["date"]
    assert set(record["results"]) == {"perplexity", "passkey", "memory", "sample"}
    assert len(record["results"]["sample"]["samples"]["samples"]) == 2
    page = (output / "results.md").read_text()
    assert "limited to 2 samples" in page
    for name in ("loss_by_position.png", "needle_passkey.png"):
        assert (output / name).exists() and name in page
    assert "### Loss by position" in shown and "| 161-300" in shown
    # Something is said before each suite, and the summary comes last, every score beside chance.
    assert shown.index("Suite 1 of 4: perplexity ...") < shown.index("## perplexity")
    last = shown[shown.rindex("## ") :]
    assert last.startswith("## summary") and last in shown.split("--- 2, sampled")[1]
    assert page.index("## summary") < page.index("## perplexity")
    rows = [row for suite in ("perplexity", "passkey") for row in record["results"][suite]["summary"]]
    assert len(rows) == 6 and all(row["chance"] is not None for row in rows)
    (text,) = next(iter(record["results"]["perplexity"]["tables"].values()))
    # The first two documents, of which the second is longer than the longest length.
    assert text["documents"] == 2 and 300 < text["n"] < 2 * 300
    assert "Continuations come after '>>>'.\n--- 1, greedy\n" in shown and "--- 1, sampled\n" in shown
    assert sorted(path.name for path in output.iterdir()) == [
        "loss_by_position.png", "needle_passkey.png", "results.json", "results.md"
    ]  # fmt: skip


@pytest.mark.parametrize("kind", ["llama", "mamba2"])
def test_another_causal_model(folders, text_file, tmp_path, kind, capsys):
    options = ["--suite", "perplexity,sample", "--max_new_tokens", "2", "--lengths", "128", "--output_dir", tmp_path]
    assert evaluate(folders[kind], text_file, *options) == 0
    shown = capsys.readouterr().out
    assert "### Loss by position" in shown
    record = json.loads((tmp_path / "results.json").read_text(), parse_constant=pytest.fail)
    assert record["model"]["config"]["model_type"] == kind and record["versions"]["evaluate"]
    (row,) = next(iter(record["results"]["perplexity"]["tables"].values()))
    assert all(row[f"{name}_stderr"] > 0 for name in ("loss", "perplexity", "bits_per_byte", "accuracy"))


def test_a_model_of_no_numbers_fails_its_suites_and_keeps_the_others(folders, text_file, tmp_path, capsys):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folders["llama"])
    with torch.no_grad():
        model.lm_head.weight.fill_(float("nan"))
    model.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(folders["llama"]).save_pretrained(tmp_path)
    assert evaluate(str(tmp_path), text_file, "--suite", "perplexity,passkey,sample", "--lengths", "160") == 1
    errors = capsys.readouterr().err
    assert [line.split(":")[1].strip() for line in errors.splitlines()] == ["perplexity", "passkey", "sample"]


def test_without_matplotlib_the_tables_are_written(folders, text_file, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    output = tmp_path / "report"
    with pytest.warns(UserWarning, match="matplotlib is not installed"):
        options = ["--suite", "perplexity", "--lengths", "128", "--output_dir", output]
        assert evaluate(folders["llama"], text_file, *options) == 0
    assert sorted(path.name for path in output.iterdir()) == ["results.json", "results.md"]
    assert ".png" not in (output / "results.md").read_text()


def test_flags_of_the_training_text_are_ignored_with_a_word(folders, text_file):
    with pytest.warns(UserWarning, match="--max_train_samples is ignored"):
        assert evaluate(folders["llama"], text_file, "--suite", "sample", "--max_train_samples", 3) == 0
    with pytest.warns(UserWarning, match="--validation_split_percentage is ignored: --validation_file is given"):
        assert evaluate(folders["llama"], text_file, "--suite", "sample", "--validation_split_percentage", 9) == 0


def test_another_text_replaces_that_of_the_recipe(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("suite: perplexity\ndataset_name: a/b\ndataset_config_name: large\nstreaming: true\n")
    args = parse([str(recipe), "--model_name_or_path", "m", "--train_file", "mine.txt"], SUITES)
    assert (args.dataset_name, args.dataset_config_name, args.streaming) == (None, None, False)
    assert (args.train_file, args.suite) == ("mine.txt", "perplexity")


def test_the_share_that_was_held_out_is_honoured(tmp_path):
    file = tmp_path / "text.jsonl"
    file.write_text("".join(json.dumps({"text": f"document {index}"}) + "\n" for index in range(60)))
    of_share = partial(Arguments, train_file=str(file))
    few, many = (held_out_documents(of_share(validation_split_percentage=share)).texts for share in (5, 50))
    assert set(few) < set(many)


def test_the_text_of_a_run_of_several_files_is_found(tmp_path):
    rows = [f"document {index}" for index in range(60)]
    for name, some in (("a.csv", rows[:30]), ("b.csv", rows[30:])):
        (tmp_path / name).write_text("id,body,title\n" + "".join(f"{text[9:]},{text},t\n" for text in some) + "1,2\n")
    flags = {
        "train_file": [str(tmp_path / "a.csv"), str(tmp_path / "b.csv")], "text_column": "body", "on_bad_rows": "skip",
    }  # fmt: skip
    (tmp_path / "run.json").write_text(json.dumps({"identity": flags}))
    with pytest.warns(UserWarning, match="2 of 62 rows"):
        held = held_out_documents(Arguments(model_name_or_path=str(tmp_path)))
    with pytest.warns(UserWarning, match="2 of 62 rows"):
        assert held.texts == open_sources(DataConfig(**flags)).validation["text"][:] and held.texts[0] in rows
    for wrong in ({"train_file": [3]}, {"train_file": []}, {"on_bad_rows": "no"}):
        (tmp_path / "run.json").write_text(json.dumps({"identity": flags | wrong}))
        with pytest.warns(UserWarning, match=f"does not name the run's text .{next(iter(wrong))} is"):
            held_out_documents(Arguments(model_name_or_path=str(tmp_path)))


def test_samples_longer_than_the_models_positions_are_refused(folders, text_file, capsys):
    assert evaluate(folders["gpt2"], text_file, "--suite", "sample", "--max_new_tokens", 128) == 2
    error = capsys.readouterr().err
    assert "--max_new_tokens 128 after prompts of up to 33 tokens goes beyond the model's 160 positions" in error


@pytest.mark.parametrize("limit", [None, 2])
def test_a_stream_holds_out_what_it_does_in_training(tmp_path, limit):
    file = tmp_path / "text.jsonl"
    file.write_text("".join(json.dumps({"text": f"document {index}"}) + "\n" for index in range(60)))
    data = {"train_file": str(file), "streaming": True, "validation_split_percentage": 20.0, "max_eval_samples": limit}
    held = held_out_documents(Arguments(**data))
    whole = held_out_documents(Arguments(**data | {"streaming": False, "max_eval_samples": None}))
    assert held.texts == open_sources(DataConfig(**data)).validation["text"][:] and len(held.texts) > 1
    assert held.texts[0] in whole.texts
    assert str(file) in held.source


def test_a_validation_file_is_no_stream(text_file):
    with pytest.warns(UserWarning, match="--streaming is ignored"):
        held_out_documents(Arguments(validation_file=str(text_file), streaming=True))


def test_offline_nothing_is_asked_of_the_hub(monkeypatch, capsys):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    assert not transformers.utils.hub.is_offline_mode()
    assert main(["--suite", "sample", "--offline"]) == 2
    assert transformers.utils.hub.is_offline_mode() and datasets.config.HF_HUB_OFFLINE


def test_samples_repeat_with_their_seed(folders, text_file, tmp_path, capsys):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("the memory\n\nof a model\n")
    shown = []
    for seed in (1, 1, 2):
        options = ["--suite", "sample", "--prompts", prompts, "--max_new_tokens", 12, "--seed", seed]
        assert evaluate(folders["hope"], text_file, *options) == 0
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1] != shown[2]
    assert "--- 2" in shown[0] and "--- 3" not in shown[0]


def test_a_suite_that_cannot_run_leaves_the_others(folders, text_file, tmp_path, capsys):
    output = tmp_path / "report"
    options = ["--suite", "memory,sample", "--max_new_tokens", 2, "--output_dir", output]
    assert evaluate(folders["llama"], text_file, *options) == 1
    assert "--suite memory measures self-modifying memories" in capsys.readouterr().err
    record = json.loads((output / "results.json").read_text())
    assert list(record["failed"]) == ["memory"] and list(record["results"]) == ["sample"]
    assert "**memory could not run**" in (output / "results.md").read_text()


def test_nothing_is_written_where_nothing_ran(folders, text_file, tmp_path):
    output = tmp_path / "report"
    assert evaluate(folders["llama"], text_file, "--suite", "memory", "--output_dir", output) == 1
    assert not output.exists()


def test_a_report_is_never_overwritten(folders, text_file, tmp_path, capsys):
    (tmp_path / "results.json").write_text("{}")
    sample = partial(evaluate, folders["llama"], text_file, "--suite", "sample", "--max_new_tokens", 1, "--output_dir")
    assert sample(tmp_path) == sample(tmp_path) == 0
    assert f"--output_dir {tmp_path} holds a report already: this one goes to {tmp_path}/2" in capsys.readouterr().out
    assert (tmp_path / "results.json").read_text() == "{}"
    assert len([json.loads(file.read_text()) for file in tmp_path.glob("*Z*/results.json")]) == 2
    assert not list(tmp_path.rglob("run.lock"))
    assert evaluate(folders["hope"], text_file, "--suite", "sample", "--output_dir", tmp_path / "results.json") == 2
    assert "is a file: name a folder" in capsys.readouterr().err
    below = tmp_path / "results.json" / "report"
    assert evaluate(folders["hope"], text_file, "--suite", "sample", "--output_dir", below) == 2
    assert f"cannot be written: {tmp_path / 'results.json'} is a file" in capsys.readouterr().err


def test_a_killed_evaluation_keeps_its_numbers_and_goes_on(folders, text_file, tmp_path, capsys, monkeypatch):
    @suite(*FLAGS)
    def killed(args, subject):
        record = json.loads((tmp_path / "results.json").read_text())
        assert list(record["results"]) == ["sample"] and record["unfinished"] == ["perplexity"]
        assert "**perplexity has not ended yet**" in (tmp_path / "results.md").read_text()
        raise KeyboardInterrupt

    command = [folders["llama"], text_file, "--suite", "sample,perplexity", "--lengths", "128", "--max_new_tokens", 1]
    with monkeypatch.context() as patch:
        patch.setitem(SUITES, "perplexity", killed)
        assert evaluate(*command, "--output_dir", tmp_path) == 130
    before = json.loads((tmp_path / "results.json").read_text())
    capsys.readouterr()
    # Another model's report is not continued.
    assert evaluate(folders["hope"], *command[1:], "--output_dir", tmp_path) == 0
    assert json.loads((tmp_path / "results.json").read_text()) == before
    with monkeypatch.context() as patch:
        patch.setitem(SUITES, "sample", suite(*FLAGS)(lambda args, subject: pytest.fail("it has run before")))
        assert evaluate(*command, "--output_dir", tmp_path) == 0
    record = json.loads((tmp_path / "results.json").read_text())
    assert list(record["results"]) == ["sample", "perplexity"] and record["unfinished"] == []
    assert record["results"]["sample"] == before["results"]["sample"]
    assert "Continuations come after" in (tmp_path / "results.md").read_text()
    assert "is unfinished: sample are taken from it" in capsys.readouterr().out


@pytest.mark.parametrize("files", ["results", "samples"])
def test_a_full_disk_is_one_sentence(tmp_path, capsys, monkeypatch, files):
    def write(file, text):
        if file.name.startswith(files):
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(report, "replace_text", write)
    report.Report(Arguments(output_dir=str(tmp_path)), ["sample"]).add("sample", SuiteResult(logs={"samples": [{}]}))
    assert capsys.readouterr().err == f"error: --output_dir {tmp_path} cannot be written: No space left on device.\n"


def test_another_evaluation_in_the_folder_is_left_alone(folders, text_file, tmp_path):
    lock = FolderLock(tmp_path)
    lock.acquire()
    flags = ["--suite", "sample", "--max_new_tokens", 1, "--output_dir", tmp_path]
    assert evaluate(folders["llama"], text_file, *flags) == 0
    lock.release()
    assert len(list(tmp_path.glob("*Z/results.json"))) == 1 and not (tmp_path / "results.json").exists()


@pytest.mark.parametrize("error", [AssertionError("x"), KeyError("ctx"), ZeroDivisionError(), OSError(28, "full")])
def test_any_error_of_a_suite_is_its_own_line(folders, text_file, tmp_path, capsys, monkeypatch, error):
    @suite(*FLAGS)
    def fails(args, subject):
        raise error

    monkeypatch.setitem(SUITES, "passkey", fails)
    flags = ["--suite", "passkey,sample", "--max_new_tokens", 1, "--output_dir", tmp_path]
    assert evaluate(folders["llama"], text_file, *flags) == 1
    errors = capsys.readouterr().err
    assert errors.startswith(f"error: --suite passkey failed: {type(error).__name__}: ") and errors.count("\n") == 1
    record = json.loads((tmp_path / "results.json").read_text())
    assert list(record["results"]) == ["sample"] and list(record["failed"]) == ["passkey"] and not record["unfinished"]


def test_a_picture_that_fails_is_a_warning(folders, text_file, tmp_path, monkeypatch):
    def fails(*arguments):
        raise RuntimeError("no font")

    monkeypatch.setattr("hope_hf.evaluation.perplexity.curves", fails)
    with pytest.warns(UserWarning, match="loss_by_position.png could not be drawn .no font"):
        flags = ["--suite", "perplexity", "--lengths", "128", "--output_dir", tmp_path]
        assert evaluate(folders["llama"], text_file, *flags) == 0
    assert json.loads((tmp_path / "results.json").read_text())["pictures"] == {"perplexity": []}
    assert ".png" not in (tmp_path / "results.md").read_text()


@pytest.mark.parametrize(
    "flags, sentence",
    [
        (["--suite", "sampl"], "is none of perplexity, passkey, needle, memory, zero_shot, "),
        (["--suite", ","], "--suite ',' is empty"),
        (["--lengths", "1k,two"], "--lengths '1k,two' has 'two'"),
        (["--lengths", "0"], "--lengths '0' has '0'"),
        (["--lengths", "1k,99999999k"], "--lengths '1k,99999999k' has more than 16,777,216 tokens"),
        (["--lengths", "9" * 5000], "write whole numbers of tokens"),
        (["--depths", "0,1.5"], "--depths '0,1.5' must be comma-separated numbers from 0 to 1"),
        (["--depths", "0,nan,1"], "--depths '0,nan,1' must be comma-separated numbers from 0 to 1"),
        (["--samples_per_length", "0"], "--samples_per_length is 0: give a whole number from 1"),
        (["--limit", "-1"], "--limit is -1"),
        (["--seed", "-1"], "--seed is -1"),
        (["--learning_rate", "-1"], "--learning_rate is -1.0"),
        (["--dtype", "float16"], "float16"),
        (["--device", "tpu9"], "--device tpu9 cannot be used"),
        (["--device", "meta"], "--device meta cannot be used: this machine has cpu"),
        (["--lenghts", "1k"], "There is no flag --lenghts; did you mean --lengths?"),
        (["--train_shards", "x"], "--train_shards and --validation_file both name the text"),
        (["--dataset_mixture", "x.yaml"], "--dataset_mixture and --validation_file both name the text"),
    ],
)
def test_one_sentence_for_wrong_flags(folders, text_file, flags, sentence, capsys):
    assert main(["--model_name_or_path", folders["hope"], "--validation_file", text_file, *flags]) == 2
    error = capsys.readouterr().err
    assert sentence in error and error.count("\n") == 1


def test_one_sentence_for_wrong_files(folders, tokenizer, text_file, tmp_path, capsys):
    empty = tmp_path / "empty.txt"
    empty.write_text("")
    blank = tmp_path / "blank.txt"
    blank.write_text(" \n")
    os.mkfifo(tmp_path / "pipe")
    cases = [
        (folders["hope"], text_file, ["--prompts", str(tmp_path / "pipe")], "be read: it is not a regular file"),
        (folders["hope"], str(tmp_path / "none.txt"), [], "does not exist"),
        (folders["hope"], str(empty), [], "is empty"),
        (folders["hope"], str(blank), [], "holds no text to evaluate on"),
        (str(tmp_path / "none"), text_file, [], "--model_name_or_path"),
        (None, text_file, [], "--suite sample needs a model"),
        (folders["hope"], text_file, ["--prompts", str(empty)], "is empty: write one prompt per line"),
        (folders["hope"], text_file, ["--prompts", str(tmp_path / "none")], "cannot be read"),
        (folders["hope"], text_file, ["--prompts", str(empty), "--dataset_name", "x"], "--dataset_name and"),
    ]
    for folder, file, flags, sentence in cases:
        assert evaluate(folder, file, "--suite", "sample", *flags) == 2
        error = capsys.readouterr().err
        assert sentence in error and error.count("\n") == 1, error


def test_a_tokenizer_that_does_not_fit(folders, text_file, texts, tmp_path, capsys):
    from hope_hf.data import train_tokenizer

    train_tokenizer([*texts, "other words give other merges " * 9], 340).save_pretrained(tmp_path)
    assert evaluate(folders["hope"], text_file, "--suite", "sample", "--tokenizer_name", tmp_path) == 2
    assert "--tokenizer_name" in capsys.readouterr().err


def test_lists():
    assert parse_lengths("2k, 512,512") == [512, 2048]
    assert parse_depths("1,0.5,0") == [0.0, 0.5, 1.0]


def test_tables_are_aligned_and_join_their_errors():
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


@pytest.mark.parametrize(
    ("value", "error", "cell"),
    [
        (377.3, 14.5349, "377.3 ± 14.5"), (0.0012, 8.47e-4, "0.0012 ± 0.0008"), (0.5, 1e-6, "0.5000 ± 1.00e-06"),
        (3.99e-6, 3.14e-6, "3.99e-06 ± 3.14e-06"), (0.0, 0.0, "0.0000 ± 0.0000"),
    ],
)  # fmt: skip
def test_an_error_has_the_digits_of_its_value(value, error, cell):
    assert markdown_table([{"x": value, "x_stderr": error}]).splitlines()[-1] == f"| {cell} |"
