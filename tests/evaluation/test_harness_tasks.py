"""Task files of lm-eval can run code: refused without `--trust_remote_code`, run with it."""

import json

import pytest
import yaml

from hope_hf.evaluation.harness_tasks import find_tasks, without_foreign_code


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


ACC = "\nmetric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]"


@pytest.mark.parametrize(
    "lines",
    [
        "doc_to_target: !function code.target" + ACC,
        "doc_to_target: '{{sol}}'\nprocess_docs: !function os.system" + ACC,
        "fewshot_config: {samples: !function code.target}",
        "metric_list: [{metric: owner/metric}]",
        "metric_list: [{metric: acc, hf_evaluate: true}]",
        "generation_kwargs: {custom_generate: owner/x, trust_remote_code: true}",
        "metadata: {tokenizer: owner/x}",
        "x: [{dataset_path: pandas}]",
        "doc_to_target: !function code.target\ndoc_to_target: '{{sol}}'",
        "<<: {doc_to_target: !function code.target}\ndoc_to_target: '{{sol}}'",
        "metadata: !!set {!function code.target: null}",
        "nobody_knows: [{deep: [!function code.target]}]",
        "metadata: {!function code.target: 1}",
        "metadata: &a {a: !function code.target}",
        "a: !!python/object/apply:os.system [x]",
        "doc_to_target: '{{ cycler.__init__.__globals__.os.getcwd() }}'" + ACC,
    ],
)
def test_no_line_of_a_file_runs_code(task_file, tmp_path, arguments, lines):
    path = task_file(lines)
    for file in (path, task_file(f"include: {path.name}", "outer")):
        for tasks in (str(file), f"piqa,{file}"):
            with pytest.raises(ValueError, match=f"^--tasks .*{file.name} is no task .*give --trust_remote_code"):
                find_tasks(arguments(tasks=tasks))
    assert not (tmp_path / "ran").exists()


def test_code_runs_where_it_is_trusted(task_file, tmp_path, arguments):
    path = task_file("doc_to_target: !function code.target" + ACC)
    manager, tasks = find_tasks(arguments(tasks=str(path), trust_remote_code=True))
    manager.load(tasks)
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ("a: [", "cannot be read"),
        ("a: " + 100_000 * "[", "cannot be read"),
        ("include: missing.yaml", "cannot be loaded: "),
        ("include: {a: b}", "include is not a path"),
        ("include: 5", "include is not a path"),
        ("task: 5", "task or group is not a name"),
        ("group: g\ntask: [other.yaml]", "names the file other.yaml"),
        ("a: !!python/x 1", "cannot be loaded: "),
    ],
)
def test_what_cannot_be_read_is_one_sentence(task_file, arguments, lines, reason):
    """A deeply nested file, read by PyYAML's loader in C, would end the process."""
    path = task_file(lines)
    with pytest.raises(ValueError, match=rf"^--tasks .*task.yaml[^\n]*{reason}[^\n]*$"):
        manager, tasks = find_tasks(arguments(tasks=str(path), trust_remote_code=True))
        manager.load(tasks)


def test_code_of_a_tokenizer_is_not_run_by_lm_evals_own_functions(tmp_path):
    """RULER's functions load the tokenizer with `trust_remote_code=True`."""
    from transformers import AutoTokenizer

    (tmp_path / "config.json").write_text('{"model_type": "none"}')
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\nclass Own: pass\n")
    (tmp_path / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": ["own.Own", null]}}')
    with without_foreign_code(trusted=False), pytest.raises(ValueError, match="would run Own, code of a model or"):
        AutoTokenizer.from_pretrained(tmp_path, trust_remote_code=True)
    assert not (tmp_path / "ran").exists()
