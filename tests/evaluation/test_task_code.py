"""Task files of lm-eval that would run code: refused without `--trust_remote_code`, run with it."""

import json
from types import SimpleNamespace

import pytest
import yaml

from hope_hf.evaluation import main
from hope_hf.evaluation.harness_tasks import find_tasks
from hope_hf.evaluation.task_code import refuse_code, sandboxed_templates


@pytest.fixture
def task_file(tmp_path):
    """`task_file(text, name)` writes a task with these lines; its code leaves the file `ran`."""
    (tmp_path / "data.jsonl").write_text(json.dumps({"goal": "a b", "sol": "c"}) + "\n")
    code = f"open({str(tmp_path / 'ran')!r}, 'w').close()\ndef target(doc): return doc['sol']\n"
    (tmp_path / "code.py").write_text(code)

    def write(lines: str, name: str = "task"):
        fields = {
            "task": name, "dataset_path": "json", "test_split": "test", "output_type": "loglikelihood",
            "dataset_kwargs": {"data_files": {"test": str(tmp_path / "data.jsonl")}}, "doc_to_text": "{{goal}}",
        }  # fmt: skip
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump(fields) + lines + "\n")
        return path

    return write


def arguments(path, trust: bool) -> SimpleNamespace:
    return SimpleNamespace(offline=False,
        tasks=str(path), suite="zero_shot", trust_remote_code=trust, data_dir=None, num_fewshot=None, limit=None,
        tokenizer_name=None, model_name_or_path=None, rows=1,
    )  # fmt: skip


ACC = "\nmetric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]"


@pytest.mark.parametrize(
    ("lines", "what"),
    [
        ("doc_to_target: !function code.target" + ACC, "the Python function code.target"),
        ("doc_to_target: '{{sol}}'\nprocess_docs: !function os.system" + ACC, "the Python function os.system"),
        ("fewshot_config: {samples: !function code.target}", "the Python function code.target"),
        ("metric_list: [{metric: owner/metric}]", "the metric owner/metric"),
        ("metric_list: [{metric: acc, hf_evaluate: true}]", "a metric of the package evaluate"),
        ("use_prompt: prompts.yaml:mine", "the prompts prompts.yaml:mine"),
    ],
)
def test_code_is_refused_by_name(task_file, tmp_path, lines, what):
    path = task_file(lines)
    for file in (path, task_file(f"include: {path.name}", "outer")):
        with pytest.raises(ValueError, match=f"{file.name} would run .*{what}.*task.yaml.*--trust_remote_code"):
            find_tasks(arguments(file, trust=False))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("lines", ["a: !!python/name:os.system", "a: [", "include: missing.yaml"])
def test_what_cannot_be_read_is_one_sentence(task_file, lines):
    with pytest.raises(ValueError, match="^--tasks .*\\.$"):
        refuse_code(task_file(lines))


def test_a_file_without_code_is_taken_and_may_include_itself(task_file):
    refuse_code(task_file("include: task.yaml\ndoc_to_target: '{{sol}}'" + ACC))


def test_code_runs_where_it_is_trusted(task_file, tmp_path):
    manager, tasks = find_tasks(arguments(task_file("doc_to_target: !function code.target" + ACC), trust=True))
    manager.load(tasks)
    assert (tmp_path / "ran").exists()


def test_templates_do_not_reach_the_interpreter():
    import lm_eval.utils

    escape = "{{ cycler.__init__.__globals__.os.getcwd() }}"
    assert lm_eval.utils.apply_template(escape, {}).startswith("/")
    with pytest.raises(ValueError, match="A template of --tasks would run code"), sandboxed_templates():
        assert lm_eval.utils.apply_template("{{ text | regex_replace('a', 'b') }}", {"text": "aa"}) == "bb"
        lm_eval.utils.apply_template(escape, {})
    assert lm_eval.utils.apply_template(escape, {}).startswith("/")


def test_the_suite_renders_templates_in_the_sandbox(folders, task_file, capsys):
    path = task_file("doc_to_target: '{{ cycler.__init__.__globals__.os.getcwd() }}'" + ACC)
    assert main(["--model_name_or_path", folders["hope"], "--suite", "zero_shot", "--tasks", str(path)]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: A template of --tasks would run code") and error.count("\n") == 1, error
