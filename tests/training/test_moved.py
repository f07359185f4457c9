"""A run goes on where its text, tokenizer, model or origin lies elsewhere, and says what differs where they do."""

import json
import shutil
from pathlib import Path

import pytest
from training_runs import curve

from hope_hf.data import difference_of_text
from hope_hf.data.text_facts import file_facts
from hope_hf.training.checkpoints.run_folder import differences

EACH = ["--checkpointing_steps", "2", "--save_total_limit", "9", "--eval_steps", "0"]


@pytest.fixture
def elsewhere(corpus, tmp_path) -> list[str]:
    """The flags of the corpus, copied to another folder under other names."""
    folder = tmp_path / "disk2"
    shutil.copytree(Path(corpus[1]).parent, folder)
    (folder / "train.jsonl").rename(folder / "part-0.jsonl")
    return [corpus[0], str(folder / "part-0.jsonl"), corpus[2], str(folder / "validation.jsonl"), corpus[4],
            str(folder / "tokenizer")]  # fmt: skip


def test_text_and_tokenizer_may_be_moved_and_renamed(run, elsewhere, tmp_path, capsys):
    _, whole = run("whole", *EACH)
    run("a", *EACH, "--stop_after", 4)
    capsys.readouterr()
    status, rows = run("a", *EACH, data=elsewhere)
    assert status == 0 and curve(rows) == curve(whole)
    assert f"is now {elsewhere[1]}, with the same content" in capsys.readouterr().out
    assert json.loads((tmp_path / "a/run.json").read_text())["identity"]["train_file"] == elsewhere[1]
    # A complete run stays complete, wherever its text lies.
    assert run("whole", *EACH, data=elsewhere)[0] == 0 and "is complete" in capsys.readouterr().out
    # Another text in place of a complete run's is refused, and not taken for it.
    with open(elsewhere[1], "a") as file:
        file.write('{"text": "one more document"}\n')
    assert run("whole", *EACH, data=elsewhere)[0] == 2
    told = capsys.readouterr().err
    assert "--train_file: " in told and "part-0.jsonl" in told and "bytes" in told
    # The documented way to go on with more rows.
    assert "--model_name_or_path" in told
    more = ["--model_name_or_path", str(tmp_path / "whole")]
    assert run("more", *EACH, "--max_train_steps", 2, model=more, data=elsewhere)[0] == 0


def test_a_stream_may_be_moved(run, corpus, elsewhere, capsys):
    stream = ["--streaming", "--shuffle_buffer_size", 8]
    _, whole = run("whole", *EACH, *stream)
    run("a", *EACH, *stream, "--stop_after", 4)
    status, rows = run("a", *EACH, *stream, data=elsewhere)
    assert status == 0 and curve(rows) == curve(whole)
    with open(elsewhere[1], "a") as file:
        file.write('{"text": "one more document"}\n')
    assert run("a", *EACH, *stream, "--max_train_steps", 9, data=elsewhere)[0] == 2
    assert "part-0.jsonl" in capsys.readouterr().err


def test_a_run_and_its_origin_are_moved_together(run, tmp_path, capsys):
    run("old/base", *EACH, "--max_train_steps", 4, "--lr_scheduler_type", "constant")
    flags = [*EACH, "--lr_scheduler_type", "constant", "--max_train_steps", 8]
    run("old/fork", *flags, "--resume_from_checkpoint", tmp_path / "old/base", "--stop_after", 2)
    run("old/other", *EACH, "--seed", 7, "--max_train_steps", 2)
    (tmp_path / "old").rename(tmp_path / "new")
    capsys.readouterr()
    status, rows = run("new/fork", *flags, "--resume_from_checkpoint", tmp_path / "new/base")
    assert status == 0 and rows[-1]["step"] == 8 and "fork/checkpoint-6 at step 6" in capsys.readouterr().out
    flags[-1] = 10
    assert run("new/fork", *flags, "--resume_from_checkpoint", tmp_path / "new/other")[0] == 2
    assert "did not begin from --resume_from_checkpoint" in capsys.readouterr().err


def test_a_checkpoint_may_lie_on_another_disk(run, tmp_path):
    run("a", *EACH, "--stop_after", 4)
    place = tmp_path / "disk2" / "checkpoint-4"
    place.parent.mkdir()
    (tmp_path / "a/checkpoint-4").rename(place)
    (tmp_path / "a/checkpoint-4").symlink_to(place)
    status, rows = run("a", *EACH, "--resume_from_checkpoint", tmp_path / "a/checkpoint-4", "--stop_after", 2)
    assert status == 0 and rows[-1]["step"] == 6
    shutil.rmtree(tmp_path / "a/checkpoint-6")
    status, rows = run("a", *EACH, "--resume_from_checkpoint", place)
    assert status == 0 and rows[-1]["step"] == 8


def test_the_model_that_a_run_began_from_is_known_by_its_weights(run, tmp_path, capsys):
    run("base", *EACH, "--max_train_steps", 2)
    run("other", *EACH, "--max_train_steps", 3, "--seed", 1)
    for name, lora in (("full", []), ("lora", ["--lora_rank", 2])):
        run(name, *EACH, *lora, "--stop_after", 2, model=["--model_name_or_path", str(tmp_path / "base")])
    (tmp_path / "base").rename(tmp_path / "moved")
    for name, lora in (("full", []), ("lora", ["--lora_rank", 2])):
        capsys.readouterr()
        assert run(name, *EACH, *lora, model=["--model_name_or_path", str(tmp_path / "other")])[0] == 2
        assert "has other weights than" in capsys.readouterr().err
        status, rows = run(name, *EACH, *lora, model=["--model_name_or_path", str(tmp_path / "moved")])
        assert status == 0 and rows[-1]["step"] == 8


def test_the_options_of_levels_decide_and_not_their_file():
    ours = {"level_optimizers": "b.json", "content of level_optimizers": {"1": 2}}
    theirs = ours | {"level_optimizers": "a.json"}
    assert differences(ours, theirs) == []
    assert differences({"level_optimizers": None}, theirs) == ["level_optimizers"]


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        ({"a": "x"}, {"a": "x" * 2}, "a had 1 bytes and has 2"),
        ({"a": "x"}, {"a": "y"}, "a has other text in as many bytes"),
        ({"a": "x"}, {"a": "x", "b": "y"}, "b is new"),
        ({"a": "x", "b": "y"}, {"a": "x"}, "b is missing"),
        ({"a": "x"}, {"b": "yy"}, r"a (1 bytes) was read, and now b (2 bytes)"),
        ({"a": "x", "b": "y"}, {"b": "x", "a": "y"}, None),
        ({"a": "x", "b": "y"}, {"b": "y", "a": "x"}, "its files are read in another order"),
    ],
)
def test_what_differs_is_said_of_the_file(tmp_path, before, now, said):
    facts = []
    for name, contents in (("before", before), ("now", now)):
        (tmp_path / name).mkdir()
        for file, text in contents.items():
            (tmp_path / name / file).write_text(text)
        facts.append({"--train_file": [file_facts(tmp_path / name / file) for file in contents]})
    found = difference_of_text(*facts)
    assert found == (said and f"--train_file: {said}")


def test_a_grown_text_is_read_from_its_first_row_with_the_optimizer_of_before(run, elsewhere, tmp_path, capsys):
    constant = [*EACH, "--lr_scheduler_type", "constant"]
    run("a", *constant, "--max_train_steps", 4)
    with open(elsewhere[1], "a") as file:
        file.write('{"text": "one more document"}\n')
    source = tmp_path / "a/checkpoint-4"
    on = [*constant, "--resume_from_checkpoint", source, "--ignore_data_skip"]
    status, whole = run("grown", *on, data=elsewhere)
    assert status == 0 and "which is read from its first row on" in capsys.readouterr().out
    # The first step has the weights and rows of a new run from this model, the second one not its optimizer.
    begun = ["--model_name_or_path", str(source)]
    _, anew = run("anew", *constant, "--max_train_steps", 2, model=begun, data=elsewhere)
    assert curve(whole)[0] == curve(anew)[0] and curve(whole)[1] != curve(anew)[1]
    # The same command goes on with the run's own place in the text.
    run("parts", *on, "--stop_after", 2, data=elsewhere)
    # Its checkpoint may lie on another disk.
    own = tmp_path / "parts/checkpoint-6"
    own.rename(tmp_path / "disk3")
    own.symlink_to(tmp_path / "disk3")
    status, parts = run("parts", *on, data=elsewhere)
    assert status == 0 and len(curve(parts)) == 4 and curve(parts) == curve(whole)
    # The flag is of a run that begins from another one's checkpoint.
    for flags in (["--ignore_data_skip"], ["--ignore_data_skip", "--resume_from_checkpoint", "latest"]):
        assert run("b", *flags)[0] == 2 and "--ignore_data_skip" in capsys.readouterr().err
