"""Metrics as objects of `evaluate`."""

import evaluate
import pytest

from hope_hf.cli.metrics import next_token_accuracy


def test_the_accuracy_needs_no_folder_that_can_be_written(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(evaluate.config, "HF_METRICS_CACHE", tmp_path / "file" / "metrics")
    metric = next_token_accuracy()
    metric.add_batch(predictions=[1, 2], references=[1, 3])
    metric.add_batch(predictions=[4, 5], references=[4, 5])
    assert metric.compute() == {"accuracy": pytest.approx(0.75)}
