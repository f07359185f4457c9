"""lm-eval's numbers are the same by path, with our suite, in two processes, and with files instead of the Hub."""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import datasets
import pytest
import torch
import yaml

from hope_hf.data import plain_ids
from hope_hf.evaluation import harness_tasks, main, session
from hope_hf.evaluation.documents import BadDocuments
from hope_hf.evaluation.harness_tasks import find_tasks, overrides, without_foreign_code
from hope_hf.evaluation.suites import with_own_tasks
from hope_hf.evaluation.zero_shot import rows, zero_shot

ROOT = Path(__file__).parents[2]

# Only lm-eval, as its command runs: a path, the folder's own code, no hope_hf.
BY_PATH = """
import json, sys
sys.modules["hope_hf"] = None
import lm_eval
from lm_eval.tasks import TaskManager

folder, tasks = sys.argv[1:]
found = lm_eval.simple_evaluate(
    model="hf", model_args=f"pretrained={folder},trust_remote_code=True", device="cpu", batch_size=3, limit=5,
    tasks=["choice", "cloze", "rolling", "until"],
    task_manager=TaskManager(include_path=tasks, include_defaults=False),
)
print(json.dumps(found["results"]))
"""


@pytest.fixture(autouse=True)
def _alone(monkeypatch):
    # lm-eval draws its samples in this process, not in a pool of forks of pytest
    monkeypatch.setenv("DISABLE_MULTIPROC", "1")
    # its description of the machine takes seconds
    monkeypatch.setattr("torch.utils.collect_env.get_pretty_env_info", str)


@pytest.fixture(scope="module")
def tasks(texts, tmp_path_factory) -> Path:
    """A task of every kind that lm-eval asks models for, texts of unequal lengths; `rolling` has one document."""
    folder = tmp_path_factory.mktemp("tasks")
    words = texts[1].split()
    documents = [
        {"goal": " ".join(words[i : i + 3 + 7 * i]), "sol1": words[i + 60], "sol2": "of what", "label": i % 2}
        for i in range(7)
    ]
    shared = {"dataset_path": "json", "test_split": "test", "doc_to_text": "{{goal}}", "metadata": {"version": 3}}
    kinds = {
        "choice": {
            "output_type": "multiple_choice", "doc_to_choice": "{{[sol1, sol2]}}", "doc_to_target": "label",
            "metric_list": [
                {"metric": name, "higher_is_better": True, "aggregation": "mean"} for name in ("acc", "acc_norm")
            ],
        },
        "cloze": {
            "output_type": "loglikelihood", "doc_to_target": " {{sol1}}",
            "metric_list": [
                {"metric": "perplexity", "higher_is_better": False, "aggregation": "perplexity"},
                {"metric": "acc", "higher_is_better": True, "aggregation": "mean"},
            ],
        },
        "rolling": {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{goal}}"},
        "until": {
            "output_type": "generate_until", "doc_to_target": "{{sol1}}", "num_fewshot": 0,
            "generation_kwargs": {"until": ["the"], "max_gen_toks": 6},
            "metric_list": [{"metric": "chrf", "higher_is_better": True, "aggregation": "chrf"}],
        },
    }  # fmt: skip
    for name, own in kinds.items():
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in documents[-1 if name == "rolling" else 0 :]))
        task = {"task": name, **shared, **own, "dataset_kwargs": {"data_files": {"test": str(data)}}}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(task))
    return folder


@pytest.fixture
def trusting(arguments):
    """Build `Arguments` that trust task files."""
    return partial(arguments, trust_remote_code=True)


@pytest.fixture(scope="module")
def paths(tasks) -> str:
    return ",".join(str(tasks / f"{name}.yaml") for name in ("choice", "cloze", "rolling", "until"))


# lm-eval's folders of the paper's tasks.
PAPER = ("wikitext", "lambada", "piqa", "hellaswag", "winogrande", "arc", "siqa", "super_glue/boolq")


@pytest.fixture
def piqa(monkeypatch, tmp_path, texts) -> Path:
    """A folder with files for lm-eval's PIQA.

    Only the paper's tasks are known here: to list all takes half a minute.
    """
    import lm_eval.tasks

    home = Path(lm_eval.tasks.__file__).parent
    stock = home / "piqa"
    folders = [home / name for name in PAPER]
    monkeypatch.setattr(
        lm_eval.tasks,
        "TaskManager",
        lambda include_defaults, metadata: KNOWN(
            metadata=metadata, include_path=folders if include_defaults else None
        ),
    )
    KNOWN = partial(lm_eval.tasks.manager.TaskManager, include_defaults=False)
    words = texts[3].split()
    for split, first in (("validation", 0), ("train", 50)):
        made = [
            {"goal": " ".join(words[i : 2 * i + 5]), "sol1": words[i + 9], "sol2": "a long text", "label": i % 2}
            for i in range(first, first + 6)
        ]
        (tmp_path / f"piqa_{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made))
    include = {"include": str(stock / "piqa.yaml"), "task": "mine", "dataset_path": "json"}
    include["dataset_kwargs"] = {"data_files": {s: str(tmp_path / f"piqa_{s}.jsonl") for s in ("train", "validation")}}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(include))
    return tmp_path


@pytest.fixture
def nine(piqa, texts) -> Path:
    """A folder with three documents for each of the paper's tasks, in the columns of the Hub."""
    words = texts[3].split()
    answers = {"text": ["reads", "writes the memory"], "label": ["A", "B"]}
    rows = {
        "wikitext_test": {"page": " ".join(words[:60])},
        "lambada_openai_test": {"text": " ".join(words[:20])},
        "hellaswag_validation": {
            "ctx_a": "A model", "ctx_b": "it", "activity_label": "Reading",
            "endings": ["reads", "learns what", "a", "said"],
        },
        "winogrande_validation": {
            "sentence": "The memory _ reads.", "option1": "it", "option2": "what was", "answer": "2",
        },
        "arc_easy_test": {"question": "What writes?", "choices": answers, "answerKey": "B"},
        "arc_challenge_test": {"question": "What learns?", "choices": answers, "answerKey": "A"},
        "social_iqa_validation": {
            "context": "It reads.", "question": "Why?", "answerA": "to learn", "answerB": "it", "answerC": "a",
            "label": "1",
        },
        "boolq_validation": {"passage": "A model reads.", "question": "does it", "label": 1},
    }  # fmt: skip
    for name, row in rows.items():
        made = [row | ({"label": str(i % 2)} if name.startswith("hella") else {}) for i in range(3)]
        (piqa / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made))
    return piqa


def evaluate(folder, *flags) -> int:
    return main([*map(str, ["--model_name_or_path", folder, "--device", "cpu", "--cpu_threads", 1, *flags])])


def table(result) -> list[dict]:
    (found,) = result.tables.values()
    return found


def numbers(found: list[dict]) -> list[float]:
    return [number for row in found for number in (row["value"], row["value_stderr"] or 0.0, row["n"])]


@pytest.mark.processes
def test_digits_are_those_of_lm_eval_on_the_path(folders, tasks, paths, subject, trusting, tmp_path):
    environment = os.environ | {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-P", "-c", BY_PATH, folders["hope"], str(tasks)]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    theirs = json.loads(done.stdout.splitlines()[-1])
    args = trusting(model_name_or_path=folders["hope"], tasks=paths, batch_size="3", limit=5)
    ours = table(zero_shot(args, subject()))
    assert {row["metric"] for row in ours} >= {"acc", "acc_norm", "perplexity", "word_perplexity", "chrf"}
    assert len(ours) == sum("," in key and "_stderr" not in key for found in theirs.values() for key in found)
    assert {row["task"] for row in ours if row["value"]} == {"choice", "cloze", "rolling", "until"}
    assert {row["metric"]: row["chance"] for row in ours if row["task"] == "choice"} == {"acc": 0.5, "acc_norm": 0.5}
    assert {row["chance"] for row in ours if row["task"] != "choice"} == {None}
    for row in ours:
        found = theirs[row["task"]]
        assert row["value"] == found[f"{row['metric']},none"], row
        assert (row["value_stderr"] or "N/A") == (found[f"{row['metric']}_stderr,none"] or "N/A"), row
        assert row["n"] == found["sample_len"] == (1 if row["task"] == "rolling" else 5)
        assert (row["version"], row["num_fewshot"]) == ("3", 0)


def test_what_stands_right_of_a_text_changes_none_of_its_logits(subject):
    """lm-eval pads on the right and gives no mask."""
    model, generator = subject().model, torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.vocab_size, (3, 41), generator=generator)
    other = ids.clone()
    lengths = [5, 17, 41]
    for row, length in zip(other, lengths, strict=True):
        row[length:] = 0
    with torch.no_grad():
        padded, otherwise = model(other).logits, model(ids).logits
        for row, length in enumerate(lengths):
            alone = model(ids[row : row + 1, :length]).logits[0]
            torch.testing.assert_close(padded[row, :length], alone, rtol=1e-5, atol=1e-5)
            assert torch.equal(padded[row, :length], otherwise[row, :length])
    assert not torch.allclose(padded[0, 5:], otherwise[0, 5:], atol=1e-2)


def test_the_size_of_batches_changes_no_score(folders, paths, subject, trusting):
    one, four = (
        table(zero_shot(trusting(model_name_or_path=folders["hope"], tasks=paths, batch_size=str(size)), subject()))
        for size in (1, 4)
    )
    assert numbers(one) == pytest.approx(numbers(four), rel=1e-5)


@pytest.mark.processes
@pytest.mark.usefixtures("warm_python")
def test_two_processes_give_the_digits_of_one(folders, paths, subject, trusting, tmp_path):
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path[1:]]),
        "ACCELERATE_USE_CPU": "true",
    }
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--config_file"]
    launcher += [str(ROOT / "accelerate_configs" / "ddp.yaml"), "--num_processes", "2", str(ROOT / "run_eval.py")]
    flags = ["--model_name_or_path", folders["hope"], "--suite", "zero_shot", "--tasks", paths, "--batch_size", "3"]
    flags += ["--trust_remote_code"]
    flags += ["--cpu_threads", "1", "--device", "cpu", "--output_dir", str(tmp_path / "two")]
    done = subprocess.run([*launcher, *flags], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("## zero_shot") == done.stdout.count("Report: ") == 1
    record = json.loads((tmp_path / "two" / "results.json").read_text())
    (two,) = record["results"]["zero_shot"]["tables"].values()
    one = table(zero_shot(trusting(model_name_or_path=folders["hope"], tasks=paths, batch_size="3"), subject()))
    assert [(row["task"], row["metric"]) for row in two] == [(row["task"], row["metric"]) for row in one]
    # a row rounds differently in another batch
    assert numbers(two) == pytest.approx(numbers(one), rel=1e-6)
    assert record["versions"]["lm_eval"] in next(iter(record["results"]["zero_shot"]["tables"]))


@pytest.mark.parametrize("suite", ["perplexity", "zero_shot,memory"])
def test_other_suites_run_in_one_process(folders, suite, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert evaluate(folders["hope"], "--suite", suite, "--tasks", "piqa") == 2
    name = suite.split(",")[-1]
    assert capsys.readouterr().err == f"error: --suite {name} runs in one process: start it with hope-hf eval.\n"


@pytest.mark.parametrize("shots", [None, 2])
def test_files_stand_for_the_hub_and_all_else_is_lm_evals(folders, piqa, subject, trusting, shots):
    args = partial(trusting, model_name_or_path=folders["hope"], num_fewshot=shots)
    stock = zero_shot(args(tasks="piqa", data_dir=str(piqa)), subject())
    included = zero_shot(args(tasks=str(piqa / "mine.yaml")), subject())
    assert numbers(table(stock)) == numbers(table(included))
    assert {(row["task"], row["num_fewshot"], row["n"]) for row in table(stock)} == {("piqa", shots or 0, 6)}


def test_the_papers_row_has_its_order_and_the_average_of_eight_accuracies(folders, nine, tmp_path, capsys):
    output = tmp_path / "report"
    flags = ["--suite", "zero_shot", "--data_dir", nine, "--log_samples", "--offline", "--output_dir", output]
    assert evaluate(folders["llama"], *flags, "--batch_size", "auto", "--max_length", 512) == 0
    tables = json.loads((output / "results.json").read_text())["results"]["zero_shot"]["tables"]
    rows, (row,) = tables.values()
    assert list(row) == [
        "wiki ppl", "lambada ppl", "lambada acc", "piqa acc", "hellaswag acc_n", "winogrande acc", "arc-e acc",
        "arc-c acc_n", "siqa acc", "boolq acc", "average", "average_stderr",
    ]  # fmt: skip
    value = {(found["task"], found["metric"]): found["value"] for found in rows}
    assert row["wiki ppl"] == value["wikitext", "word_perplexity"]
    assert row["lambada ppl"] == value["lambada_openai", "perplexity"]
    accuracies = [row[name] for name in row if " acc" in name]
    assert len(accuracies) == 8 and row["average"] == pytest.approx(sum(accuracies) / 8)
    assert row["arc-c acc_n"] == 100 * value["arc_challenge", "acc_norm"]
    assert len({found["task"] for found in rows}) == 9 and "| wiki ppl |" in capsys.readouterr().out
    documents = [json.loads(line) for line in (output / "samples_boolq.jsonl").read_text().splitlines()]
    assert len(documents) == 3 and documents[0]["doc"]["passage"] == "A model reads."
    assert len(list(output.glob("samples_*.jsonl"))) == 9


def test_the_papers_row_needs_all_tasks_and_names_may_be_the_papers():
    from hope_hf.evaluation.harness_tasks import paper_row, written_out

    assert paper_row([{"task": "piqa", "metric": "acc", "value": 0.5, "value_stderr": 0.1}]) is None
    assert written_out(["siqa", "copa"]) == ["social_iqa", "copa"] and len(written_out(["paper", "piqa"])) == 9


def test_longer_sequences_are_cut(folders, tasks, subject, trusting):
    args = partial(trusting, model_name_or_path=folders["hope"], tasks=str(tasks / "rolling.yaml"))
    short, whole = (table(zero_shot(args(max_length=size), subject())) for size in (16, None))
    assert short[0]["value"] != whole[0]["value"]
    with pytest.raises(ValueError, match="--max_length 1,000 is more than the model's 512 positions"):
        zero_shot(args(max_length=1000), subject("llama"))


def test_a_context_that_spells_a_special_token_is_text(folders, tasks, subject, trusting, monkeypatch):
    def stop(model, **_):
        raise ValueError(repr([model.tok_encode(text), model.tok_batch_encode([text])[0][0].tolist()]))

    text, loaded = "a <|endoftext|> b", subject()
    monkeypatch.setattr("lm_eval.simple_evaluate", stop)
    args = trusting(model_name_or_path=folders["hope"], tasks=str(tasks / "rolling.yaml"))
    with pytest.raises(ValueError) as caught:
        zero_shot(args, loaded)
    assert json.loads(str(caught.value)) == [plain_ids(loaded.tokenizer, text)] * 2


def test_flags_of_lm_eval_are_ignored_with_a_word_elsewhere(folders, text_file):
    flags = ["--suite", "sample", "--max_new_tokens", 1, "--validation_file", text_file]
    with pytest.warns(UserWarning, match="--max_length is ignored: it is for --suite zero_shot"):
        assert evaluate(folders["llama"], *flags, "--max_length", 64) == 0
    with pytest.warns(UserWarning, match="--batch_size auto is for --suite zero_shot"):
        assert evaluate(folders["llama"], *flags, "--batch_size", "auto") == 0


def test_examples_change_the_question(folders, piqa, subject, arguments):
    asked = []

    def recording(answer, requests):
        asked.append([request.args[0] for request in requests])
        return answer(requests)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hope_hf.evaluation.zero_shot.answer_together", recording)
        patch.setattr("torch.distributed.is_initialized", lambda: True)
        for shots in (0, 2):
            args = arguments(model_name_or_path=folders["hope"], tasks="piqa", data_dir=str(piqa), num_fewshot=shots)
            zero_shot(args, subject())
    assert [context.count("Question: ") for context in asked[0] + asked[1]] == [1] * 12 + [3] * 12


def test_splits_without_files_are_left_out_where_nothing_reads_them(tmp_path, arguments):
    config = {"dataset_path": "hub/x", "dataset_name": "y", "training_split": "train", "validation_split": "dev"}
    config |= {"test_split": "test", "fewshot_config": {"sampler": "first_n", "split": "dev"}}
    (tmp_path / "x_test.parquet").touch()
    found = overrides("x", config, tmp_path, arguments())
    assert "hope_hf" in found["dataset_kwargs"].pop("cache_dir")
    assert found == {
        "dataset_path": "parquet",
        "dataset_name": None,
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "x_test.parquet")}},
        "training_split": None,
        "validation_split": None,
        "test_split": "test",
        "fewshot_split": None,
        "fewshot_config": {"sampler": "first_n", "split": None},
    }
    with pytest.raises(ValueError, match="has no x_dev.parquet: lm-eval's task x reads its split dev"):
        overrides("x", config, tmp_path, arguments(num_fewshot=1))
    # lm-eval keeps a task's 0, whatever the user sets
    assert overrides("x", config | {"num_fewshot": 0}, tmp_path, arguments(num_fewshot=1))["test_split"] == "test"
    (tmp_path / "x_dev.parquet").touch()
    found = overrides("x", config, tmp_path, arguments(num_fewshot=1))
    assert set(found["dataset_kwargs"]["data_files"]) == {"test", "dev"} and "fewshot_config" not in found


def test_local_data_may_lie_in_a_folder_whose_name_looks_like_a_pattern(tmp_path, arguments, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    config = {"dataset_path": "hub/x", "test_split": "test"}
    for folder in ("data1", "data[1]"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x_test.jsonl").write_text(json.dumps({"goal": folder}))
    found = overrides("x", config, tmp_path / "data[1]", arguments())
    rows = datasets.load_dataset(found["dataset_path"], **found["dataset_kwargs"])
    assert rows["test"]["goal"][:] == ["data[1]"]


def test_local_data_replaced_by_a_file_of_the_same_time_are_read_anew(tmp_path, arguments, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    file = tmp_path / "x_test.jsonl"
    for word in ("alpha", "omega"):
        file.write_text(json.dumps({"goal": word}))
        os.utime(file, (1, 1))
        found = overrides("x", {"dataset_path": "hub/x", "test_split": "test"}, tmp_path, arguments())
        rows = datasets.load_dataset(found["dataset_path"], **found["dataset_kwargs"])
        assert rows["test"]["goal"][:] == [word]


def test_a_number_of_examples_that_the_task_forbids_is_told(folders, tasks, subject, trusting):
    args = trusting(model_name_or_path=folders["hope"], tasks=str(tasks / "until.yaml"), num_fewshot=1, limit=1)
    with pytest.warns(UserWarning, match="--num_fewshot has no effect on until: lm-eval defines it for 0"):
        zero_shot(args, subject())


def test_each_suite_takes_the_tasks_it_knows(piqa, arguments, monkeypatch):
    def seen(suite, tasks):
        return with_own_tasks(arguments(suite="needle,zero_shot", model_name_or_path="x", tasks=tasks), suite)

    assert seen("needle", "mk-niah-1,piqa,s-niah-1").tasks == "mk-niah-1,s-niah-1"
    assert find_tasks(seen("zero_shot", "mk-niah-1,piqa,s-niah-1"))[1] == ["piqa"]
    with pytest.raises(ValueError, match="--tasks names none of lm-eval's tasks"):
        find_tasks(seen("zero_shot", "s-niah-1"))
    with pytest.raises(ValueError, match="--tasks paritty is not a task of lm-eval"):
        find_tasks(seen("zero_shot", "s-niah-1,paritty"))


def test_more_shots_than_examples(folders, piqa, capsys):
    flags = ["--suite", "zero_shot", "--tasks", "piqa", "--data_dir", piqa, "--num_fewshot", 7]
    assert evaluate(folders["hope"], *flags) == 2
    assert "error: --num_fewshot 7 is more than the examples that a task has: lower it." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "status", "sentence"),
    [
        (["--tasks", " , "], 2, "--tasks names none of lm-eval's tasks"),
        (["--tasks", "piqa,all"], 2, "--tasks all is no task: write paper"),
        (
            ["--tasks", "piqa", "--batch_size", "many"],
            2,
            "--batch_size is 'many': give a whole number from 1 to 65,536, or",
        ),
        (["--tasks", "piqa", "--batch_size", "0"], 2, "--batch_size is '0'"),
        (["--tasks", "piqa", "--batch_size", "auto"], 2, "--batch_size auto tries rows of up to 1,048,576 tokens"),
        (["--tasks", "piqa", "--log_samples"], 2, "--log_samples writes files: name their folder with --output_dir"),
        (["--data_dir", "{data}"], 2, "has no wikitext_test.jsonl: lm-eval's task wikitext reads its split test"),
        (["--tasks", "piqa", "--num_fewshot", "-1"], 2, "--num_fewshot is -1: give a whole number from 0"),
        (["--tasks", "piqa", "--data_dir", "n" * 300], 2, "is not a folder"),
        (["--tasks", "pika"], 2, "--tasks pika is not a task of lm-eval; did you mean piqa?"),
        (["--tasks", "none.yaml"], 2, "--tasks none.yaml does not exist"),
        (["--tasks", "piqa", "--data_dir", "{data}/none"], 2, "none is not a folder"),
        (
            ["--tasks", "piqa", "--data_dir", "{data}/empty"],
            2,
            "has no piqa_validation.jsonl: lm-eval's task piqa reads",
        ),
        (["--tasks", "piqa", "--data_dir", "{data}/broken"], 2, "cannot be loaded from --data_dir"),
        (["--tasks", "piqa", "--data_dir", "{data}/columns"], 2, "validation.jsonl has no column goal, which the"),
        (
            ["--tasks", "{data}/mine.yaml", "--data_dir", "{data}", "--trust_remote_code"],
            2,
            "mine.yaml, a group or a file: name single tasks",
        ),
    ],
)
def test_one_sentence_for_what_cannot_be_asked(folders, piqa, flags, status, sentence, capsys):
    for name, content in (("empty", None), ("broken", "{"), ("columns", '{"question": "why"}\n')):
        (piqa / name).mkdir()
        if content:
            (piqa / name / "piqa_validation.jsonl").write_text(content)
    flags = [flag.replace("{data}", str(piqa)) for flag in flags]
    assert evaluate(folders["hope"], "--suite", "zero_shot", *flags) == status
    error = capsys.readouterr().err
    assert sentence in error and error.startswith("error: ") and error.count("\n") == 1, error


@pytest.mark.parametrize(
    ("task", "changes", "sentence"),
    [
        ("boolq", {"label": None}, "in document 1 of .*boolq_validation.jsonl there is no column label .its"),
        ("boolq", {"label": 2}, "document 1 of .*the label .label. is 2, none of 2 choices .no, yes"),
        ("boolq", {"label": -1}, "the label .label. is -1"),
        ("boolq", {"question": 5}, ""),
        ("piqa", {"label": "x"}, "the label .label. is x, none of 2 choices"),
        ("piqa", {"sol1": None}, "piqa_validation.jsonl has no column sol1, which the task reads"),
        ("hellaswag", {"ctx_a": None}, "hellaswag_validation.jsonl has no column ctx_a"),
        ("hellaswag", {"endings": None}, "hellaswag_validation.jsonl has no column endings"),
        ("winogrande", {"answer": "3"}, "the label .* is 2, none of 2 choices|cannot read document 1 of .* KeyError"),
        ("arc_easy", {"answerKey": "E"}, "arc_easy|'E' is not in list"),
        ("wikitext", {"page": None}, "has no column page"),
        ("lambada_openai", {"text": None}, "has no column text"),
    ],
)
def test_documents_are_checked_before_the_model_is_asked(piqa, nine, arguments, task, changes, sentence):
    (file,) = [file for file in nine.glob(f"{task}_*.jsonl") if "train" not in file.name]
    rows = [json.loads(line) | changes | {"x": 1} for line in file.read_text().splitlines()]
    kept = [{key: value for key, value in row.items() if value is not None} for row in rows]
    file.write_text("".join(json.dumps(row) + "\n" for row in kept))
    args = arguments(suite="zero_shot", tasks=task, data_dir=str(nine), model_name_or_path="x")
    with without_foreign_code(trusted=False):
        manager, tasks = find_tasks(args)
        if not sentence:
            assert manager.load(tasks)
            return
        with pytest.raises(BadDocuments, match=f"^--tasks {task}.*({sentence})"):
            manager.load(tasks)


def test_examples_are_read_from_their_own_file(folders, piqa, capsys):
    file = piqa / "piqa_train.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    for row in rows:
        del row["goal"]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ["--suite", "zero_shot", "--tasks", "piqa", "--data_dir", piqa, "--num_fewshot", 1]
    assert evaluate(folders["hope"], *flags) == 2
    assert "piqa_train.jsonl has no column goal, which the task reads" in capsys.readouterr().err


def test_without_lm_eval_nothing_runs(folders, text_file, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(session, "find_spec", lambda name: None)
    flags = ["--suite", "sample,zero_shot", "--tasks", "piqa", "--max_new_tokens", 2, "--validation_file", text_file]
    assert evaluate(folders["hope"], *flags, "--output_dir", tmp_path / "report") == 2
    assert "error: --suite zero_shot needs lm_eval: pip install 'hope_hf[eval]'" in capsys.readouterr().err
    assert not (tmp_path / "report").exists()


def test_rows_keep_filters_and_leave_out_what_is_no_score():
    found = {
        "results": {
            "gsm": {"alias": "gsm", "sample_len": 9, "exact_match,strict": 0.5, "exact_match_stderr,strict": "N/A"},
            f"{harness_tasks.LOCAL}: gsm": {"alias": "x", "sample_len": 9},
        },
        "versions": {"gsm": 2.0},
        "n-shot": {"gsm": 5},
    }
    row = {"task": "gsm", "version": "2.0", "num_fewshot": 5, "metric": "exact_match,strict", "n": 9}
    assert rows(found) == [row | {"value": 0.5, "value_stderr": None}]
    found["results"]["gsm"]["exact_match,strict"] = float("nan")
    with pytest.raises(ValueError, match="zero_shot: exact_match of gsm is nan"):
        rows(found)
