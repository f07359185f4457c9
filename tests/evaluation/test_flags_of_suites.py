"""Which flags a suite reads: every other one that is given is warned of."""

import json
import re
import shutil
from dataclasses import fields

import pytest

from hope_hf.data.text_facts import file_facts
from hope_hf.evaluation import main
from hope_hf.evaluation.flags import ALWAYS, Arguments, chosen_tasks, parse, suite
from hope_hf.evaluation.held_out import held_out_documents
from hope_hf.evaluation.result import SuiteResult
from hope_hf.evaluation.subject import load_subject
from hope_hf.evaluation.suites import SUITES, with_own_tasks

NAMES = {f.name for f in fields(Arguments)}


class Recording(Arguments):
    """Arguments that note which flags are read."""

    def __getattribute__(self, name):
        if name in NAMES:
            object.__getattribute__(self, "__dict__").setdefault("seen", set()).add(name)
        return super().__getattribute__(name)


@pytest.mark.parametrize(
    ("suite", "flags"),
    [
        ("perplexity", {}),
        ("passkey", {"lengths": "160", "depths": "1"}),
        ("needle", {"lengths": "300", "depths": "1", "tasks": "s-niah-1"}),
        ("memory", {"lengths": "64"}),
        ("sample", {}),
    ],
)
def test_a_suite_declares_every_flag_that_it_reads(folders, text_file, suite, flags):
    shared = {"model_name_or_path": folders["hope"], "validation_file": text_file, "device": "cpu", "suite": suite}
    args = Recording(**shared, max_new_tokens=1, limit=1, samples_per_length=1, **flags)
    subject = load_subject(args)
    vars(args)["seen"] = set()
    SUITES[suite](args, subject)
    seen = vars(args)["seen"]
    assert seen <= SUITES[suite].reads | ALWAYS, seen - SUITES[suite].reads - ALWAYS
    own = {"samples_per_length", "limit", "seed", "lengths", "depths", "prompts", "tasks"}
    assert SUITES[suite].reads & own <= seen


@pytest.mark.parametrize(
    ("flags", "ignored"),
    [
        (["--suite", "perplexity", "--seed", "1"], "--seed is ignored: "),
        (["--suite", "passkey", "--train_file", "x"], "--train_file is ignored: "),
        (["--suite", "sample", "--prompts", "p", "--train_file", "x"], "--train_file is ignored: "),
        (["--suite", "zero_shot", "--lengths", "1k"], "--lengths is ignored: "),
        (["--suite", "sample", "--batch_size", "auto"], "--batch_size auto"),
    ],
)
def test_a_flag_that_no_suite_reads_is_warned_of(flags, ignored):
    with pytest.warns(UserWarning, match=ignored):
        parse(flags, SUITES)


def test_the_model_is_a_word_of_its_own_too(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("model_name_or_path: of/recipe\nsuite: sample\n")
    for words, model in (
        ([tmp_path, "--limit", "1"], str(tmp_path)),
        (["owner/model"], "owner/model"),
        (["x/step-*"], "x/step-*"),
        ([recipe, "other"], "other"),
        ([recipe], "of/recipe"),
        ([recipe, "--model_name_or_path", "x"], "x"),
    ):
        assert parse(list(map(str, words)), SUITES).model_name_or_path == model
    for words, named in (
        (["a/b", "--model-name-or-path", "c"], "'a/b' and --model_name_or_path"),
        (["book.txt"], "book.txt"),
        (["none.yaml"], "none.yaml"),
        (["a/b", "c/d"], "'c/d'"),
    ):
        with pytest.raises(ValueError, match=re.escape(named)):
            parse(words, SUITES)


def test_tasks_choose_their_suites_and_each_suite_its_tasks(monkeypatch, capsys):
    @suite("tasks", tasks=["toy"], over_checkpoints=True)
    def own(args, subject):
        rows = [{"task": name, "score": 1.0} for name in chosen_tasks(args, "own", ["toy"])]
        return SuiteResult({"Own": rows})

    monkeypatch.setitem(SUITES, "own", own)
    for tasks, chosen in (
        ("piqa", "zero_shot"),
        ("passkey", "needle"),
        ("mk-niah-1,a.yaml", "needle,zero_shot"),
        ("toy,passkey", "own,needle"),
    ):
        assert parse(["--tasks", tasks], SUITES).suite == chosen
        assert parse(["--tasks", tasks, "--suite", "sample,zero_shot"], SUITES).suite == "sample,zero_shot"
    assert main(["owner/model", "--tasks", "toy"]) == 0 and "| toy  | 1.0000 |" in capsys.readouterr().out
    for name, running, tasks, own_tasks in (
        ("needle", "needle,zero_shot", "mk-niah-1,piqa,s-niah-1", "mk-niah-1,s-niah-1"),
        ("zero_shot", "needle,zero_shot", "mk-niah-1,piqa,s-niah-1", "piqa"),
        # a name that none defines is refused by every suite
        ("needle", "needle,class_incremental", "x", "x"),
    ):
        assert with_own_tasks(Arguments(suite=running, tasks=tasks), name).tasks == own_tasks


@pytest.fixture
def run(folders, tmp_path):
    """The folder of a run on a text of its own, with a checkpoint."""
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps({"text": f"document {i}"}) + "\n" for i in range(60)))
    for folder in (tmp_path / "run", tmp_path / "run" / "checkpoint-3"):
        shutil.copytree(folders["llama"], folder)
    identity = {"train_file": str(tmp_path / "mine.jsonl"), "validation_split_percentage": 20.0, "block_size": 32}
    (tmp_path / "run" / "run.json").write_text(json.dumps({"identity": identity}))
    return tmp_path / "run"


@pytest.mark.parametrize("name", ["run", "run/checkpoint-3"])
def test_a_model_is_evaluated_on_what_its_run_held_out(run, text_file, name):
    folder = str(run.parent / name)
    held = held_out_documents(Arguments(model_name_or_path=folder))
    named = Arguments(train_file=str(run.parent / "mine.jsonl"), validation_split_percentage=20.0)
    assert held == held_out_documents(named)
    few = held_out_documents(Arguments(model_name_or_path=folder, max_eval_samples=1))
    assert len(few.texts) == 1 < len(held.texts)
    other = held_out_documents(Arguments(model_name_or_path=folder, validation_file=text_file))
    assert other.source == text_file


def test_a_runs_text_that_has_changed_is_named(run, recwarn):
    file = run / "run.json"
    identity = json.loads(file.read_text())["identity"]
    held_out_documents(Arguments(model_name_or_path=str(run)))
    text = run.parent / "mine.jsonl"
    file.write_text(json.dumps({"identity": identity | {"text": {"--train_file": [file_facts(text)]}}}))
    held_out_documents(Arguments(model_name_or_path=str(run)))
    assert not recwarn
    with text.open("a") as opened:
        opened.write('{"text": "one more"}\n')
    with pytest.warns(UserWarning, match="changed since the training, --train_file: mine.jsonl had .* bytes"):
        held_out_documents(Arguments(model_name_or_path=str(run)))


def test_a_runs_text_that_is_gone_is_one_sentence(run):
    (run.parent / "mine.jsonl").unlink()
    with pytest.raises(ValueError, match="run.json cannot be read.*--validation_file"):
        held_out_documents(Arguments(model_name_or_path=str(run)))
