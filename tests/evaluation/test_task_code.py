"""Task files of lm-eval that would run code: refused without `--trust_remote_code`, run with it."""

import json
import os
from types import SimpleNamespace

import pytest
import yaml

from hope_hf.evaluation import main, templates
from hope_hf.evaluation.harness_tasks import find_tasks
from hope_hf.evaluation.task_code import check_files, guarded


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
        ("generation_kwargs: {custom_generate: owner/x, trust_remote_code: true}", "the generation code owner/x"),
        ("metadata: {tokenizer: owner/x}", "the tokenizer owner/x"),
        ("unsafe_code: false", "the answers of the model"),
        ("x: [{dataset_path: pandas}]", "pickled data"),
    ],
)
def test_code_is_refused_by_name(task_file, tmp_path, lines, what):
    path = task_file(lines)
    for file in (path, task_file(f"include: {path.name}", "outer")):
        with pytest.raises(ValueError, match=f"{file.name} would run .*{what}.*task.yaml.*--trust_remote_code"):
            find_tasks(arguments(file, trust=False))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "lines",
    [
        "doc_to_target: !function code.target\ndoc_to_target: '{{sol}}'",
        "<<: {doc_to_target: !function code.target}\ndoc_to_target: '{{sol}}'",
        "metadata: !!set {!function code.target: null}",
        "metadata: !!omap [a: !function code.target]",
        "metadata: !!pairs [a: !function code.target]",
        "nobody_knows: [{deep: [!function code.target]}]",
        "metadata: {!function code.target: 1}",
        "metadata: {a: !<!function> code.target}",
        "metadata: &a {a: !function code.target}",
    ],
)
def test_no_place_of_a_function_runs_it(task_file, tmp_path, lines):
    """Not even where lm-eval reads the file without our check before."""
    from lm_eval.tasks import TaskManager

    path = task_file(lines + ACC)
    with pytest.raises(ValueError, match="^--tasks .*(Python function code.target|comes twice|<< merges)"):
        check_files(path, trusted=False)
    with pytest.raises(Exception, match="code.target|comes twice|<< merges"), guarded(trusted=False):
        TaskManager(include_defaults=False).load([str(path)])
    assert not (tmp_path / "ran").exists()


ALIASES = "\n".join(["metadata:", "  a: &a0 [x, x]"] + [f"  a{i}: &a{i} [*a{i - 1}, *a{i - 1}]" for i in range(1, 40)])


@pytest.mark.parametrize("trusted", [True, False])
@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ("a: !!python/name:os.system", "python/name"), ("a: [", "flow"), ("include: missing.yaml", "No such file"),
        ("a: " + "[" * 100_000, "nested too deep"), (ALIASES, "write .a0 out"), ("include: 5", "5 is no path"),
        ("include: {a: b}", "is no path"), ("include: [null]", "None is no path"), ("include: pipe.yaml", "regular"),
        ("group: [a]", "group is no name"), ("group: 5", "group is no name"),
        ("x: {data_files: {test: /dev/tty}}", "/dev/tty is no regular file"),
        ("doc_to_text: a", "'doc_to_text' comes twice"), ("a: " + "x" * (1 << 20), "more than 1,048,576 bytes"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_one_sentence(task_file, tmp_path, lines, reason, trusted):
    os.mkfifo(tmp_path / "pipe.yaml")
    with pytest.raises(ValueError, match=f"^--tasks .* cannot be read as a task: .*{reason}.*\\.$"):
        check_files(task_file(lines), trusted)


@pytest.mark.parametrize(("members", "reason"), [("[./other.yaml]", "names the file ./other.yaml"), ("5", "no name")])
def test_a_group_has_names_alone(tmp_path, members, reason):
    (tmp_path / "group.yaml").write_text(f"group: g\ntask: {members}\n")
    with pytest.raises(ValueError, match=f"^--tasks .* cannot be read as a task: .*{reason}"):
        check_files(tmp_path / "group.yaml", trusted=False)


def test_a_file_without_code_is_taken_and_may_include_itself(task_file):
    check_files(task_file("include: task.yaml\ndoc_to_target: '{{sol}}'" + ACC), trusted=False)


def test_code_runs_where_it_is_trusted(task_file, tmp_path):
    manager, tasks = find_tasks(arguments(task_file("doc_to_target: !function code.target" + ACC), trust=True))
    manager.load(tasks)
    assert (tmp_path / "ran").exists()


def test_templates_do_not_reach_the_interpreter():
    import lm_eval.utils

    escape = "{{ cycler.__init__.__globals__.os.getcwd() }}"
    assert lm_eval.utils.apply_template(escape, {}).startswith("/")
    with pytest.raises(ValueError, match="A template of --tasks would run code"), guarded(trusted=False):
        assert lm_eval.utils.apply_template("{{ text | regex_replace('a', 'b') }}", {"text": "aa"}) == "bb"
        lm_eval.utils.apply_template(escape, {})
    assert lm_eval.utils.apply_template(escape, {}).startswith("/")


@pytest.mark.parametrize("trusted", [True, False])
@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "seconds"),
        ("{{ 'a' * 9999999999 }}", "MiB"), ("{{ 'a'|center(9999999999) }}", "MiB"),
        ("{% set n = 20000000 %}{{ 'a' * n }}", "a text of 20,000,000 characters"),
        ("{{ 2.0|round(-1000000000) }}", "rounds to"),
        ("{{ '" + "a" * 40 + "'|regex_replace('(a+)+b', '') }}", "seconds"),
    ],
)  # fmt: skip
def test_a_template_has_limits(monkeypatch, template, reason, trusted):
    import lm_eval.utils

    monkeypatch.setattr(templates, "SECONDS", 0.2)
    with guarded(trusted), pytest.raises(ValueError, match=f"^A template of --tasks .*{reason}"):
        lm_eval.utils.apply_template(template, {})


@pytest.mark.parametrize("template", ["{{ 9 ** 999999999 }}", "{{ (9 ** 20000) * (9 ** 20000) }}"])
def test_a_template_computes_no_endless_number(template):
    import lm_eval.utils

    with guarded(trusted=False), pytest.raises(ValueError, match="^A template of --tasks computes a number of"):
        lm_eval.utils.apply_template(template, {})


def test_code_of_a_tokenizer_is_not_run_by_lm_evals_own_functions(tmp_path):
    """RULER's functions load the tokenizer with `trust_remote_code=True`."""
    from transformers import AutoTokenizer

    (tmp_path / "config.json").write_text('{"model_type": "none"}')
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\nclass Own: pass\n")
    (tmp_path / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": ["own.Own", null]}}')
    with guarded(trusted=False), pytest.raises(ValueError, match="would run Own, code of a model or tokenizer"):
        AutoTokenizer.from_pretrained(tmp_path, trust_remote_code=True)
    assert not (tmp_path / "ran").exists()


def test_the_suite_renders_templates_in_the_sandbox(folders, task_file, capsys):
    path = task_file("doc_to_target: '{{ cycler.__init__.__globals__.os.getcwd() }}'" + ACC)
    assert main(["--model_name_or_path", folders["hope"], "--suite", "zero_shot", "--tasks", str(path)]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: A template of --tasks would run code") and error.count("\n") == 1, error
