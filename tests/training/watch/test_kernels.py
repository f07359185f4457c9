"""What a run says where torch's operators replaced kernels of a GPU."""

from collections import Counter

import pytest
from training_runs import HOPE

from hope_hf.model import memory_mixer
from hope_hf.training.watch import kernels

NAME = "kernel/memory_scan/fallbacks"


@pytest.fixture
def refused(monkeypatch):
    """Every scan of a mixer counts as one that the kernels refused, for one of two reasons in turn."""
    reasons = []

    def choose(name, asked, kernels, otherwise, fallbacks, device):
        reasons.append("it is Monday" if len(reasons) % 2 else "it rains")
        fallbacks[name, reasons[-1]] += 1
        return otherwise

    monkeypatch.setattr(memory_mixer, "choose", choose)
    return reasons


def test_a_run_counts_them_and_ends_with_the_reasons(run, refused, capfd):
    status, rows = run("a", "--logging_steps", "2", model=HOPE)
    printed = capfd.readouterr().out
    assert status == 0
    counts = [row[NAME] for row in rows if "train/loss" in row]
    # two layers, in the steps 1, 2, 3 and 4, 5 and 6, 7 and 8
    assert counts == [2, 2, 4, 4, 4]
    assert "| memory_scan |" in printed and "it is Monday" in printed and "it rains" in printed


def test_a_run_without_them_says_nothing(run, capfd):
    status, rows = run("a", model=HOPE)
    assert status == 0 and "kernels" not in capfd.readouterr().out
    assert not any(NAME in row for row in rows)


def test_those_of_all_processes_and_layers_count(monkeypatch, tiny_model):
    model = tiny_model()
    report = kernels.KernelReport(model)
    mixers = [layer.mixer for layer in model.model.layers]
    monkeypatch.setattr(kernels, "gather_object", lambda own: [*own, Counter({("memory_scan", "another GPU"): 5})])
    assert report.table() == ""
    for mixer in mixers:
        mixer.kernel_fallbacks["memory_scan", "it rains"] += 1
    assert report.rows() == {NAME: 7}
    mixers[0].kernel_fallbacks["memory_scan", "it rains"] += 1
    assert report.rows() == {NAME: 1}
    lines = report.table().splitlines()
    assert lines[-2:] == ["| memory_scan | 5 | another GPU |", "| memory_scan | 3 | it rains |"]
