"""A run goes on where its text, tokenizer, model or origin lies elsewhere, and says what differs where they do."""

import json
import shutil
from pathlib import Path

import pytest
from training_runs import EVERY_FOURTH, curve, forget_the_end

from hope_hf.data import difference_of_text
from hope_hf.data.text_facts import file_facts
from hope_hf.training.checkpoints.run_folder import differences

EACH = ["--checkpointing_steps", "2", "--save_total_limit", "9", "--eval_steps", "0"]
CONSTANT = [*EACH, "--lr_scheduler_type", "constant"]


@pytest.fixture
def elsewhere(corpus, tmp_path) -> list[str]:
    """The flags of the corpus, copied to another folder under other names."""
    folder = tmp_path / "disk2"
    shutil.copytree(Path(corpus[1]).parent, folder)
    (folder / "train.jsonl").rename(folder / "part-0.jsonl")
    return [corpus[0], str(folder / "part-0.jsonl"), corpus[2], str(folder / "validation.jsonl"), corpus[4],
            str(folder / "tokenizer")]  # fmt: skip


def add_a_document(data: list[str]) -> None:
    with open(data[1], "a") as file:
        file.write('{"text": "one more document"}\n')


def test_text_and_tokenizer_may_be_moved_and_renamed(run, trained, elsewhere, tmp_path, capsys):
    whole = trained("llama")
    folder = whole.copy(tmp_path / "a")
    # A complete run stays complete, wherever its text lies.
    assert run("a", *EVERY_FOURTH, data=elsewhere)[0] == 0 and "is complete" in capsys.readouterr().out
    forget_the_end(folder, 8)
    status, rows = run("a", *EVERY_FOURTH, data=elsewhere)
    assert status == 0 and curve(rows) == curve(whole.rows)
    assert f"is now {elsewhere[1]}, with the same content" in capsys.readouterr().out
    assert json.loads((folder / "run.json").read_text())["identity"]["train_file"] == elsewhere[1]
    # Another text in place of a complete run's is refused, and not taken for it.
    add_a_document(elsewhere)
    whole.copy(tmp_path / "b")
    assert run("b", *EVERY_FOURTH, data=elsewhere)[0] == 2
    told = capsys.readouterr().err
    assert "--train_file: " in told and "part-0.jsonl" in told and "--model_name_or_path" in told


def test_a_stream_may_be_moved(run, elsewhere, tmp_path, capsys):
    stream = [*EACH, "--streaming", "--shuffle_buffer_size", 8, "--max_train_steps", 4]
    _, whole = run("a", *stream)
    forget_the_end(tmp_path / "a", 4)
    status, rows = run("a", *stream, data=elsewhere)
    assert status == 0 and curve(rows) == curve(whole)
    add_a_document(elsewhere)
    assert run("a", *stream, "--max_train_steps", 9, data=elsewhere)[0] == 2
    assert "part-0.jsonl" in capsys.readouterr().err


def test_a_run_and_its_origin_are_moved_together(run, trained, tmp_path, capsys):
    base = trained("llama").copy(tmp_path / "old/base")
    fork = [*EACH, "--seed", 42, "--max_train_steps", 12]
    run("old/fork", *fork, "--resume_from_checkpoint", base, "--stop_after", 2)
    (tmp_path / "old").rename(tmp_path / "new")
    capsys.readouterr()
    # Its checkpoint lies on another disk.
    checkpoint = tmp_path / "new/fork/checkpoint-10"
    checkpoint.rename(tmp_path / "disk2")
    checkpoint.symlink_to(tmp_path / "disk2")
    status, rows = run("new/fork", *fork, "--resume_from_checkpoint", tmp_path / "new/base")
    assert status == 0 and rows[-1]["step"] == 12 and "fork/checkpoint-10 at step 10" in capsys.readouterr().out
    run("new/other", *EACH, "--seed", 7, "--max_train_steps", 1)
    longer = [*fork, "--max_train_steps", 14]
    assert run("new/fork", *longer, "--resume_from_checkpoint", tmp_path / "new/other")[0] == 2
    assert "did not begin from --resume_from_checkpoint" in capsys.readouterr().err


def test_the_model_that_a_run_began_from_is_known_by_its_weights(run, trained, tmp_path, capsys):
    for name in ("base", "other"):
        trained("llama").copy(tmp_path / name)
    shutil.copy(tmp_path / "other/checkpoint-4/model.safetensors", tmp_path / "other/model.safetensors")
    steps = [*EACH, "--max_train_steps", 2]
    for name, lora in (("full", []), ("lora", ["--lora_rank", 2])):
        run(name, *steps, *lora, "--stop_after", 1, model=["--model_name_or_path", str(tmp_path / "base")])
    (tmp_path / "base").rename(tmp_path / "moved")
    for name, lora in (("full", []), ("lora", ["--lora_rank", 2])):
        assert run(name, *steps, *lora, model=["--model_name_or_path", str(tmp_path / "other")])[0] == 2
        assert "has other weights than" in capsys.readouterr().err
        assert run(name, *steps, *lora, model=["--model_name_or_path", str(tmp_path / "moved")])[0] == 0


def test_the_options_of_levels_decide_and_not_their_file():
    ours = {"level_optimizers": "b.json", "content of level_optimizers": {"1": 2}}
    theirs = ours | {"level_optimizers": "a.json"}
    assert differences(ours, theirs) == []
    assert differences({"level_optimizers": None}, theirs) == ["level_optimizers"]


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        ({"a": "x"}, {"a": "y"}, "a has other text in as many bytes"),
        ({"a": "x"}, {"a": "x", "b": "y"}, "b is new"),
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
    run("a", *CONSTANT, "--max_train_steps", 4)
    add_a_document(elsewhere)
    source = tmp_path / "a/checkpoint-4"
    on = [*CONSTANT, "--resume_from_checkpoint", source, "--ignore_data_skip"]
    # The same command goes on with the run's own place in the text.
    run("parts", *on, "--stop_after", 2, data=elsewhere)
    assert "read from its first row on" in capsys.readouterr().out
    # Its checkpoint may lie on another disk.
    own = tmp_path / "parts/checkpoint-6"
    own.rename(tmp_path / "disk3")
    own.symlink_to(tmp_path / "disk3")
    status, parts = run("parts", *on, data=elsewhere)
    assert status == 0 and curve(parts) == curve(run("grown", *on, data=elsewhere)[1])
    # The first step has the weights and rows of a new run from this model, the second one not its optimizer.
    begun = ["--model_name_or_path", str(source)]
    _, anew = run("anew", *CONSTANT, "--max_train_steps", 2, model=begun, data=elsewhere)
    assert curve(parts)[0] == curve(anew)[0] and curve(parts)[1] != curve(anew)[1]
    # The flag is of a run that begins from another one's checkpoint.
    assert run("b", "--ignore_data_skip")[0] == 2 and "--ignore_data_skip" in capsys.readouterr().err
