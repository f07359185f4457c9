"""The metric of right tokens, and an evaluation that a signal ends."""

import os
import signal
from types import SimpleNamespace

import pytest
import torch
from training_runs import curve

from hope_hf.training import trainer
from hope_hf.training.evaluate import evaluate, right_tokens


def test_right_tokens_are_those_that_are_ranked_first():
    labels = torch.tensor([[5, 1, 2, 3], [4, 4, -100, -100]])
    # Predicts 1, 2, 0 and 5 for the first row, whose last position predicts nothing, and 4 for the second.
    ranked = torch.tensor([[1, 2, 0, 5], [4, 0, 0, 0]])
    logits = torch.nn.functional.one_hot(ranked, 6).float()
    assert right_tokens(logits, labels) == 3
    assert right_tokens(logits, labels.fill_(-100)) == 0


def test_an_evaluation_ends_between_two_batches(one_cpu_process):
    batch = {"input_ids": torch.zeros(1, 3, dtype=torch.long), "labels": torch.zeros(1, 3, dtype=torch.long)}
    model, read = torch.nn.Linear(1, 1), []
    model.forward = lambda input_ids, **more: read.append(input_ids) or SimpleNamespace(logits=torch.zeros(1, 3, 4))
    data = SimpleNamespace(validation=[batch] * 5, validation_bytes_per_token=2.0)
    accelerator = SimpleNamespace(num_processes=1, process_index=0, device=torch.device("cpu"))
    assert evaluate(model, data, accelerator, stopped=lambda: len(read) == 2) is None
    assert len(read) == 2 and model.training
    metrics = evaluate(model, data, accelerator)
    assert len(read) == 7
    # ln 4 a token, which stands for two bytes
    assert metrics["eval/loss"] == pytest.approx(1.3862944)
    assert metrics["eval/bits_per_byte"] == pytest.approx(1.0)


def test_ctrl_c_ends_an_evaluation_inside_training(run, tmp_path, monkeypatch, capsys):
    def interrupted(*arguments):
        os.kill(os.getpid(), signal.SIGINT)
        return evaluate(*arguments)

    monkeypatch.setattr(trainer, "evaluate", interrupted)
    status, rows = run("a", "--eval_steps", "2")
    told = capsys.readouterr().out
    assert status == 0 and "step 2/8 | evaluating " in told and "ended by a signal" in told
    assert curve(rows, "eval/loss") == [] and (tmp_path / "a" / "checkpoint-2").is_dir()
