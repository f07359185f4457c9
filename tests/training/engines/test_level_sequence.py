"""`--level_learning sequence`: rates are trained, continued exactly and taken on, and what it refuses.

tests/training/engines/test_engines.py compares two processes with one (the run "levels").
"""

import json

import pytest
import torch
from engine_runs import SMALL
from safetensors.torch import load_file
from training_runs import HOPE, LEVELS, LLAMA, curve, forget_the_end
from transformers import AutoModelForCausalLM

RATES = "model.layers.1.continuum.levels.0.rates.weight"
STEPS = ["--max_train_steps", "3", "--checkpointing_steps", "1", "--save_total_limit", "9"]


def test_rates_are_trained_and_a_run_continues_exactly(run, tmp_path):
    _, whole = run("a", *STEPS, model=LEVELS)
    assert (load_file(tmp_path / "a" / "model.safetensors")[RATES] != 0).all()
    config = json.loads((tmp_path / "a" / "config.json").read_text())["level_learning"]
    assert config["periods"] == [8, 8] and config["learned_rate"] and config["rate"] == 0.1
    forget_the_end(tmp_path / "a", 2, 3)
    assert curve(run("a", *STEPS, model=LEVELS)[1]) == curve(whole)
    recomputed = curve(run("recomputed", *STEPS, "--gradient_checkpointing", model=LEVELS)[1])
    assert recomputed == pytest.approx(curve(whole), rel=1e-6)
    _, plain = run("plain", "--max_train_steps", "1", model=LEVELS[:2])
    assert abs(curve(plain)[0] - curve(whole)[0]) > 1e-4, "what levels learn makes no difference"


def test_a_trained_model_goes_on_with_rates_of_its_own(run, tmp_path):
    assert run("plain", "--max_train_steps", "1", model=LEVELS[:2])[0] == 0
    assert RATES not in load_file(tmp_path / "plain" / "model.safetensors")
    sequence = ["--model_name_or_path", str(tmp_path / "plain"), *LEVELS[2:]]
    assert run("on", "--max_train_steps", "2", model=sequence)[0] == 0
    weights = load_file(tmp_path / "on" / "model.safetensors")
    assert (weights[RATES] != 0).all()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "on")
    assert model.config.level_learning.learned_rate and model.config.level_learning.rate == 0.1
    torch.testing.assert_close(model.model.layers[1].continuum.levels[0].rates.weight.detach(), weights[RATES])


WRONG = {
    "llama": ([*LLAMA, "--level_learning", "sequence"], "and this is a llama"),
    "short": ([*HOPE, "--level_learning", "sequence"], "rows of two pieces or more"),
    "carry": ([*LEVELS, "--document_boundary", "carry"], "--document_boundary reset"),
    "compile": ([*LEVELS, "--torch_compile"], "--torch_compile"),
}


@pytest.mark.parametrize("flags, words", WRONG.values(), ids=WRONG)
def test_runs_that_cannot_learn_are_refused(run, capsys, flags, words):
    assert run("a", *SMALL, model=flags)[0] == 2
    assert words in capsys.readouterr().err
