"""lm-eval's numbers are the same by path, with our suite, in two processes, and with files instead of the Hub."""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import yaml

from hope_hf.evaluation import harness_tasks, main
from hope_hf.evaluation.harness_tasks import find_tasks
from hope_hf.evaluation.zero_shot import rows, zero_shot

ROOT = Path(__file__).parents[2]
# lm-eval's folders of the paper's tasks.
PAPER = ("wikitext", "lambada", "piqa", "hellaswag", "winogrande", "arc", "siqa", "super_glue/boolq")

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

# A task of every kind that lm-eval asks models for.
KINDS = yaml.safe_load("""
choice:
  output_type: multiple_choice
  doc_to_choice: "{{[sol1, sol2]}}"
  doc_to_target: label
  metric_list:
    - {metric: acc, higher_is_better: true, aggregation: mean}
    - {metric: acc_norm, higher_is_better: true, aggregation: mean}
cloze:
  output_type: loglikelihood
  doc_to_target: " {{sol1}}"
  metric_list:
    - {metric: perplexity, higher_is_better: false, aggregation: perplexity}
    - {metric: acc, higher_is_better: true, aggregation: mean}
rolling:
  output_type: loglikelihood_rolling
  doc_to_text: ""
  doc_to_target: "{{goal}}"
until:
  output_type: generate_until
  doc_to_target: "{{sol1}}"
  num_fewshot: 0
  generation_kwargs: {until: [the], max_gen_toks: 6}
  metric_list: [{metric: chrf, higher_is_better: true, aggregation: chrf}]
""")
# A document of each of the paper's tasks, in the columns of the Hub; PIQA's come from `piqa`.
ANSWERS = {"text": ["reads", "writes"], "label": ["A", "B"]}
DOCUMENTS = {
    "wikitext_test": {"page": "the memory of a model reads and writes while it learns what was said before"},
    "lambada_openai_test": {"text": "the memory of a model reads and writes while it learns"},
    "hellaswag_validation": {
        "ctx_a": "A model", "ctx_b": "it", "activity_label": "Reading",
        "endings": ["reads", "learns what", "a", "said"], "label": "1",
    },
    "winogrande_validation": {
        "sentence": "The memory _ reads.", "option1": "it", "option2": "what was", "answer": "2",
    },
    "arc_easy_test": {"question": "What writes?", "choices": ANSWERS, "answerKey": "B"},
    "arc_challenge_test": {"question": "What learns?", "choices": ANSWERS, "answerKey": "A"},
    "social_iqa_validation": {
        "context": "It reads.", "question": "Why?", "answerA": "to learn", "answerB": "it", "answerC": "a",
        "label": "1",
    },
    "boolq_validation": {"passage": "A model reads.", "question": "does it", "label": 1},
}  # fmt: skip


@pytest.fixture(autouse=True)
def _alone(monkeypatch):
    # lm-eval draws its samples in this process, not in a pool of forks of pytest
    monkeypatch.setenv("DISABLE_MULTIPROC", "1")
    # its description of the machine takes seconds
    monkeypatch.setattr("torch.utils.collect_env.get_pretty_env_info", str)


def write_rows(file: Path, documents: list[dict]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in documents))


def choices(words: list[str], first: int, count: int) -> list[dict]:
    """Documents of unequal lengths with two choices."""
    found = []
    for i in range(first, first + count):
        goal = " ".join(words[i : 2 * i + 5])
        found.append({"goal": goal, "sol1": words[i + 9], "sol2": "a long text", "label": i % 2})
    return found


@pytest.fixture(scope="module")
def tasks(texts, tmp_path_factory) -> Path:
    """A folder of the tasks `KINDS`; `rolling` has one document."""
    folder = tmp_path_factory.mktemp("tasks")
    documents = choices(texts[1].split(), 0, 7)
    for name, own in KINDS.items():
        write_rows(folder / f"{name}.jsonl", documents[-1:] if name == "rolling" else documents)
        task = {"task": name, "dataset_path": "json", "test_split": "test", "doc_to_text": "{{goal}}"} | own
        task["dataset_kwargs"] = {"data_files": {"test": str(folder / f"{name}.jsonl")}}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(task | {"metadata": {"version": 3}}))
    return folder


@pytest.fixture(scope="module")
def paths(tasks) -> str:
    return ",".join(str(tasks / f"{name}.yaml") for name in KINDS)


@pytest.fixture
def trusting(arguments, folders):
    """Build `Arguments` for HOPE that trust task files."""
    return partial(arguments, trust_remote_code=True, model_name_or_path=folders["hope"])


@pytest.fixture
def stock(monkeypatch, tmp_path, texts) -> Path:
    """A folder with files for lm-eval's tasks of the paper, and a task file that includes its PIQA.

    Only the paper's tasks are known here: to list all takes half a minute.
    """
    import lm_eval.tasks

    home = Path(lm_eval.tasks.__file__).parent
    known = lm_eval.tasks.manager.TaskManager

    def few(include_defaults, metadata):
        folders = [home / name for name in PAPER]
        return known(include_defaults=False, metadata=metadata, include_path=folders if include_defaults else None)

    monkeypatch.setattr(lm_eval.tasks, "TaskManager", few)
    words = texts[3].split()
    files = {}
    for split, first in (("validation", 0), ("train", 50)):
        files[split] = str(tmp_path / f"piqa_{split}.jsonl")
        write_rows(Path(files[split]), choices(words, first, 6))
    mine = {"include": str(home / "piqa/piqa.yaml"), "task": "mine", "dataset_path": "json"}
    mine["dataset_kwargs"] = {"data_files": files}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(mine))
    for name, document in DOCUMENTS.items():
        write_rows(tmp_path / f"{name}.jsonl", [document] * 3)
    return tmp_path


def evaluate(folder, *flags) -> int:
    flags = ["--suite", "zero_shot", "--device", "cpu", "--cpu_threads", 1, *flags]
    return main([*map(str, ["--model_name_or_path", folder, *flags])])


def table(result) -> list[dict]:
    (found,) = result.tables.values()
    return found


def numbers(found: list[dict]) -> list[float]:
    values = []
    for row in found:
        values += [row["value"], row["value_stderr"] or 0.0, row["n"]]
    return values


@pytest.mark.processes
def test_digits_are_those_of_lm_eval_on_the_path(folders, tasks, paths, subject, trusting, tmp_path, monkeypatch):
    # lm-eval runs without the package, and so without its fast paths, which round elsewhere
    monkeypatch.setenv("HOPE_KERNELS", "plain")
    environment = os.environ | {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-P", "-c", BY_PATH, folders["hope"], str(tasks)]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    theirs = json.loads(done.stdout.splitlines()[-1])
    ours = table(zero_shot(trusting(tasks=paths, batch_size="3", limit=5), subject()))
    assert {row["task"] for row in ours if row["value"]} == theirs.keys() == set(KINDS)
    for row in ours:
        scores = theirs[row["task"]]
        stderr = scores[f"{row['metric']}_stderr,none"]
        assert row["value"] == scores[f"{row['metric']},none"], row
        assert (row["value_stderr"] or "N/A") == (stderr or "N/A"), row
        assert row["n"] == scores["sample_len"] == (1 if row["task"] == "rolling" else 5)
        assert row["chance"] == (0.5 if row["task"] == "choice" else None)
    # the size of batches changes no score
    one = table(zero_shot(trusting(tasks=paths, batch_size="1", limit=5), subject()))
    assert numbers(one) == pytest.approx(numbers(ours), rel=1e-5)


@pytest.mark.processes
@pytest.mark.usefixtures("warm_python")
def test_two_processes_give_the_digits_of_one(folders, paths, subject, trusting, tmp_path):
    path = os.pathsep.join([str(ROOT), *sys.path[1:]])
    environment = os.environ | {"PYTHONPATH": path, "ACCELERATE_USE_CPU": "true"}
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "2"]
    launcher += ["--config_file", str(ROOT / "accelerate_configs" / "ddp.yaml"), str(ROOT / "run_eval.py")]
    flags = ["--model_name_or_path", folders["hope"], "--suite", "zero_shot", "--tasks", paths, "--batch_size", "3"]
    flags += ["--trust_remote_code", "--cpu_threads", "1", "--device", "cpu", "--output_dir", str(tmp_path)]
    done = subprocess.run([*launcher, *flags], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("## zero_shot") == done.stdout.count("Report: ") == 1
    record = json.loads((tmp_path / "results.json").read_text())
    (two,) = record["results"]["zero_shot"]["tables"].values()
    one = table(zero_shot(trusting(tasks=paths, batch_size="3"), subject()))
    # a row rounds differently in another batch
    assert numbers(two) == pytest.approx(numbers(one), rel=1e-6)


@pytest.mark.parametrize("shots", [None, 2])
def test_files_stand_for_the_hub_and_all_else_is_lm_evals(stock, subject, trusting, shots):
    local = table(zero_shot(trusting(tasks="piqa", data_dir=str(stock), num_fewshot=shots), subject()))
    included = table(zero_shot(trusting(tasks=str(stock / "mine.yaml"), num_fewshot=shots), subject()))
    assert numbers(local) == numbers(included)
    assert {(row["task"], row["num_fewshot"], row["n"]) for row in local} == {("piqa", shots or 0, 6)}


def test_the_papers_row_has_its_order_and_the_average_of_eight_accuracies(folders, stock, tmp_path):
    output = tmp_path / "report"
    flags = ["--data_dir", stock, "--log_samples", "--offline", "--output_dir", output]
    assert evaluate(folders["llama"], *flags, "--batch_size", "auto", "--max_length", 512) == 0
    tables = json.loads((output / "results.json").read_text())["results"]["zero_shot"]["tables"]
    scores, (row,) = tables.values()
    assert list(row) == [
        "wiki ppl", "lambada ppl", "lambada acc", "piqa acc", "hellaswag acc_n", "winogrande acc", "arc-e acc",
        "arc-c acc_n", "siqa acc", "boolq acc", "average", "average_stderr",
    ]  # fmt: skip
    value = {(score["task"], score["metric"]): score["value"] for score in scores}
    assert row["wiki ppl"] == value["wikitext", "word_perplexity"]
    assert row["lambada ppl"] == value["lambada_openai", "perplexity"]
    assert row["arc-c acc_n"] == 100 * value["arc_challenge", "acc_norm"]
    accuracies = [row[name] for name in row if " acc" in name]
    assert len(accuracies) == 8 and row["average"] == pytest.approx(sum(accuracies) / 8)
    documents = (output / "samples_boolq.jsonl").read_text().splitlines()
    assert len(documents) == 3 and json.loads(documents[0])["doc"]["passage"] == "A model reads."
    assert len(list(output.glob("samples_*.jsonl"))) == 9


def test_longer_sequences_are_cut(tasks, subject, trusting):
    args = partial(trusting, tasks=str(tasks / "rolling.yaml"))
    short, whole = (table(zero_shot(args(max_length=size), subject())) for size in (16, None))
    assert short[0]["value"] != whole[0]["value"]
    with pytest.raises(ValueError, match="--max_length 1,000 is more than the model's 512 positions"):
        zero_shot(args(max_length=1000), subject("llama"))


# Flags, and words of the sentence; `{data}` is a folder with PIQA's files.
ERRORS = [
    (["--tasks", " , "], "--tasks"),
    (["--tasks", "piqa,all"], "--tasks all"),
    (["--tasks", "piqa", "--batch_size", "many"], "--batch_size is 'many'"),
    (["--tasks", "piqa", "--batch_size", "auto"], "--max_length"),
    (["--tasks", "piqa", "--log_samples"], "--output_dir"),
    (["--data_dir", "{data}/empty"], "has no wikitext_test.jsonl"),
    (["--tasks", "pika"], "did you mean piqa?"),
    (["--tasks", "none.yaml"], "--tasks none.yaml does not exist"),
    (["--tasks", "piqa", "--data_dir", "{data}/broken"], "--data_dir {data}/broken"),
    (["--tasks", "piqa", "--data_dir", "{data}", "--num_fewshot", "7"], "--num_fewshot 7"),
    (["--tasks", "{data}/mine.yaml", "--data_dir", "{data}", "--trust_remote_code"], "mine.yaml"),
]


def test_one_sentence_for_what_cannot_be_asked(folders, stock, capsys):
    (stock / "empty").mkdir()
    (stock / "broken").mkdir()
    (stock / "broken" / "piqa_validation.jsonl").write_text("{")
    for flags, words in ERRORS:
        assert evaluate(folders["hope"], *(flag.format(data=stock) for flag in flags)) == 2
        *warned, error = capsys.readouterr().err.splitlines()
        assert error.startswith("error: ") and words.format(data=stock) in error
        assert "error" not in str(warned)


def test_other_suites_run_in_one_process(folders, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert evaluate(folders["hope"], "--suite", "zero_shot,memory") == 2
    assert "--suite memory runs in one process" in capsys.readouterr().err


def test_documents_are_checked_before_the_model_is_asked(stock, arguments):
    for task, changes, words in (
        ("boolq", {"label": None}, "document 1 .*label"),
        ("boolq", {"label": 2}, "document 1 .*label .* is 2"),
        ("boolq", {"label": -1}, "label .* is -1"),
        ("piqa", {"label": "x"}, "label .* is x"),
        ("piqa", {"sol1": None}, "no column sol1"),
        ("hellaswag", {"ctx_a": None}, "'ctx_a'"),
        ("winogrande", {"answer": "3"}, "label .* is 2|KeyError: '3'"),
        ("arc_easy", {"answerKey": "E"}, "arc_easy|'E'"),
        ("wikitext", {"page": None}, "'page'"),
    ):
        (file,) = [file for file in stock.glob(f"{task}_*.jsonl") if "train" not in file.name]
        whole = file.read_text()
        documents = []
        for line in whole.splitlines():
            row = json.loads(line) | changes | {"x": 1}
            documents.append({key: value for key, value in row.items() if value is not None})
        write_rows(file, documents)
        manager, tasks = find_tasks(arguments(tasks=task, data_dir=str(stock), model_name_or_path="x"))
        with pytest.raises(ValueError, match=f"^--tasks {task}.*({words})"):
            manager.load(tasks)
        file.write_text(whole)


def test_rows_keep_filters_and_leave_out_what_is_no_score():
    scores = {"alias": "gsm", "sample_len": 9, "exact_match,strict": 0.5, "exact_match_stderr,strict": "N/A"}
    group = {"alias": "x", "sample_len": 9}
    found = {"results": {"gsm": scores, f"{harness_tasks.LOCAL}: gsm": group}}
    found |= {"versions": {"gsm": 2.0}, "n-shot": {"gsm": 5}}
    row = {"task": "gsm", "version": "2.0", "num_fewshot": 5, "metric": "exact_match,strict", "n": 9}
    assert rows(found) == [row | {"value": 0.5, "value_stderr": None}]
    scores["exact_match,strict"] = float("nan")
    with pytest.raises(ValueError, match="exact_match of gsm is nan"):
        rows(found)
