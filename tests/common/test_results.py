"""What programs report: pictures, which never end a run, and metrics as objects of `evaluate`."""

import os
import subprocess
import sys

import evaluate
import pytest

from hope_hf.common.results import command_to_keep, draw_or_warn, next_token_accuracy


def test_the_accuracy_needs_no_folder_that_can_be_written(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(evaluate.config, "HF_METRICS_CACHE", tmp_path / "file" / "metrics")
    metric = next_token_accuracy()
    metric.add_batch(predictions=[1, 2], references=[1, 3])
    metric.add_batch(predictions=[4, 5], references=[4, 5])
    assert metric.compute() == {"accuracy": pytest.approx(0.75)}


def test_a_picture_that_fails_is_a_warning(tmp_path):
    def fails(path):
        raise RuntimeError("no such font")

    path = tmp_path / "loss.png"
    with pytest.warns(UserWarning, match=r"loss\.png .*no such font"):
        assert draw_or_warn(fails, path) is None
    assert draw_or_warn(lambda path: path.write_bytes(b""), path) == path


@pytest.mark.processes
@pytest.mark.usefixtures("warm_python")
def test_figures_of_the_caller_keep_their_backend():
    """As in a notebook, whose backend shows figures."""
    program = (
        "from hope_hf.common.results import can_draw\n"
        "assert can_draw()\n"
        "import matplotlib, os\n"
        "print(os.environ['MPLBACKEND'], matplotlib.rcParams['backend'])"
    )
    environment = {**os.environ, "MPLBACKEND": "svg", "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == ["svg", "svg"]


def test_a_shell_line_in_a_command_is_not_kept(monkeypatch):
    words = ["hope-hf", "train", "r.yaml", "--seed", "1"]
    for given, kept in (
        (["--checkpoint_hook", "curl -H secret"], ["--checkpoint_hook", "(not kept)"]),
        (["--checkpoint-hook=a=secret"], ["--checkpoint_hook=(not kept)"]),
    ):
        monkeypatch.setattr(sys, "argv", [*words, *given, "--seed", "2"])
        assert command_to_keep() == [*words, *kept, "--seed", "2"]
