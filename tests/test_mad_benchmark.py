"""benchmarks/mad.py: its models have one size, and finished trainings are not repeated."""

import json
import signal
import subprocess
import sys
import time

import psutil
import pytest

from benchmarks import mad
from benchmarks.synthetic.measure import known_tasks
from benchmarks.synthetic.model import small_model

pytestmark = pytest.mark.benchmarks

FLAGS = ["--tasks", "mad-memorisation", "--models", "llama", "--learning_rates", "3e-3", "--parallel", "1"]


def test_models_are_of_one_size_and_tasks_are_known():
    sizes = {}
    for name in mad.MODELS:
        sizes[name] = small_model(mad.Job("mad-recall", name, 3e-3, 1).architecture, 16, 0).num_parameters()
    assert sizes == pytest.approx(dict.fromkeys(sizes, sizes["hope"]), rel=0.02)
    assert set(mad.TASKS) <= set(known_tasks())


@pytest.fixture
def results(tmp_path):
    """A results file with one row, which is not from a training."""
    job = mad.Job("mad-memorisation", "llama", 3e-3, 1)
    row = {"task": job.task, "model": job.model, "learning_rate": job.learning_rate, "seed": job.seed}
    file = tmp_path / "mad.jsonl"
    file.write_text(json.dumps(row | {"accuracy": [0.125], "settings": job.settings}) + "\n")
    return file


def test_a_finished_training_is_reported_and_not_repeated(results, capsys):
    before = results.read_text()
    assert mad.main([*FLAGS, "--results", str(results)]) == 0
    assert results.read_text() == before
    said = capsys.readouterr().out
    assert "| llama | 12.5 (0.003) |" in said
    assert "| hope | missing |" in said


def test_a_row_of_other_settings_is_left_out(results, capsys, monkeypatch):
    monkeypatch.setitem(mad.TASKS, "mad-memorisation", (32, 999))
    assert mad.main([*FLAGS, "--results", str(results), "--report"]) == 0
    assert "12.5" not in capsys.readouterr().out


def test_a_task_that_is_solved_is_not_tried_at_other_rates():
    first, second = (mad.Job("mqar", "hope", rate, 1) for rate in (3e-3, 1e-2))
    assert mad.unsolved([first, second], {}) == [first, second]
    assert mad.unsolved([first, second], {first: [1.0, 0.999]}) == [second]
    assert mad.unsolved([first, second], {first: [1.0, 1.0]}) == []
    other_seed = mad.Job("mqar", "hope", 1e-2, 2)
    assert mad.unsolved([second, other_seed], {first: [1.0, 1.0]}) == [second, other_seed]


def test_the_best_rate_counts_and_a_diverged_one_does_not():
    rows = {mad.Job("mqar", "hope", rate, seed): value for rate, seed, value in [
        (3e-3, 1, [0.9, 0.5]), (3e-3, 2, [0.9, 0.7]), (1e-2, 1, [1.0, 0.9]), (1e-2, 2, None), (3e-2, 1, None),
        (1e-3, 1, [0.9, 0.5]), (1e-3, 2, [0.8, 0.7]),
    ]}  # fmt: skip
    assert "| hope | 90.0 ± 0.0 / 60.0 ± 14.1 (0.003) |" in mad.table(rows)
    assert "| hope | diverged |" in mad.table({job: None for job in rows})


def test_a_training_gives_a_row(tmp_path, monkeypatch):
    monkeypatch.setitem(mad.TASKS, "mad-memorisation", (2, 2))
    row = mad.measure(mad.Job("mad-memorisation", "gated_deltanet", 3e-3, 1))
    assert len(row["accuracy"]) == 1 and 0 <= row["accuracy"][0] <= 1
    assert (row["steps"], row["n"]) == (2, 256)
    assert json.loads(json.dumps(row)) == row


def test_stopped_by_sigterm_it_leaves_no_training(tmp_path):
    words = ["--tasks", "mqar", "--models", "hope", "--parallel", "1", "--results", tmp_path / "new.jsonl"]
    with (tmp_path / "said").open("w") as said:
        program = subprocess.Popen([sys.executable, mad.__file__, *map(str, words)], stderr=said)
    own, trainings = psutil.Process(program.pid), []
    while not trainings and program.poll() is None:
        time.sleep(0.1)
        trainings = [child for child in own.children() if "spawn_main" in " ".join(child.cmdline())]
    program.send_signal(signal.SIGTERM)
    status = program.wait(60)
    _, alive = psutil.wait_procs(trainings, timeout=10)
    for training in alive:
        training.kill()
    assert trainings and not alive
    assert status == 130
    assert "Stopped: the same command goes on with what is left." in (tmp_path / "said").read_text().splitlines()


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--parallel", "0"], "--parallel"),
        (["--learning_rates", "2"], "--learning_rates"),
        (["--report", "--results", "{folder}"], "--results"),
        (["--report", "--results", "{broken}"], "line 1"),
    ],
)
def test_mistakes_are_one_sentence(results, flags, words, capsys):
    row = json.loads(results.read_text()) | {"accuracy": 0.125}
    broken = results.with_name("broken.jsonl")
    broken.write_text(json.dumps(row) + "\n")
    assert mad.main([flag.format(folder=results.parent, broken=broken) for flag in flags]) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1
