"""`--level_learning sequence`: the curve of one process under DDP and FSDP2, exact continuation, and refusals."""

import json

import pytest
import torch
from engine_runs import ROWS, SMALL, run_plan, same
from safetensors.torch import load_file
from training_runs import HOPE, LLAMA, curve
from transformers import AutoModelForCausalLM

from hope_hf.training import main

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("warm_python"), pytest.mark.xdist_group("sequence")]
# without the gate, since a new model's loss is that of a uniform guess
MODEL = dict(
    hidden_size=64, num_hidden_layers=2, level_intermediate_sizes=[32, 32], level_periods=[256, 512],
    memory_chunk_size=8, level_learning=dict(blocks=[0, 1], rate=0.1, drift=0.3, gate=False),
)  # fmt: skip
SEQUENCE = ["--config_overrides", json.dumps(MODEL), "--level_learning", "sequence", "--level_learning_period", "8"]
STEPS, SAVED_STEP = 5, 3
RATES = "model.layers.1.continuum.levels.0.rates.weight"


def plan(corpus: list[str], processes: int) -> dict[str, dict]:
    rows = ["--per_device_train_batch_size", str(ROWS // processes)]
    length = ["--max_train_steps", str(STEPS), "--checkpointing_steps", str(SAVED_STEP)]
    flags = [*SEQUENCE, *corpus, *SMALL, *rows, *length]
    return {
        "hope": {"flags": flags},
        "recomputed": {"flags": [*flags, "--gradient_checkpointing"]},
        "continued": {"flags": flags, "forget": [STEPS]},
    }


@pytest.fixture(scope="module")
def rows(tmp_path_factory, corpus):
    """`rows(engine)`: the rows of all its runs, and their folder."""
    launched = {}

    def of(engine: str):
        if engine not in launched:
            processes = 1 if engine == "single" else 2
            folder = tmp_path_factory.mktemp(engine)
            launched[engine] = run_plan(engine, processes, plan(corpus, processes), folder), folder
        return launched[engine]

    return of


def test_one_process_trains_rates_and_continues_exactly(rows, corpus, tmp_path):
    found, folder = rows("single")
    assert curve(found["continued"]) == curve(found["hope"])
    same(found["recomputed"], found["hope"], 1e-6)
    weights = load_file(folder / "hope" / "model.safetensors")
    assert (weights[RATES] != 0).all()
    config = json.loads((folder / "hope" / "config.json").read_text())["level_learning"]
    assert config["periods"] == [8, 8] and config["learned_rate"] and config["rate"] == 0.1
    second = ["--per_device_train_batch_size", "8", "--max_train_steps", "2", "--output_dir", str(tmp_path / "plain")]
    plain = [flag for flag in SEQUENCE if not flag.startswith(("--level", "sequence", "8"))]
    assert main([*plain, *corpus, *SMALL, *second]) == 0
    first = json.loads((tmp_path / "plain" / "metrics.jsonl").read_text().splitlines()[0])
    assert abs(first["train/loss"] - curve(found["hope"])[0]) > 1e-4, "what levels learn makes no difference"


def test_a_trained_model_goes_on_with_rates_of_its_own(corpus, tmp_path, monkeypatch):
    monkeypatch.setenv("HOPE_KERNELS", "plain")
    short = [*corpus, *SMALL, "--per_device_train_batch_size", "4", "--max_train_steps", "2"]
    sequence = [*SEQUENCE[2:], "--model_name_or_path", str(tmp_path / "plain"), "--output_dir", str(tmp_path / "on")]
    assert main([*SEQUENCE[:2], *short, "--output_dir", str(tmp_path / "plain")]) == 0
    assert RATES not in load_file(tmp_path / "plain" / "model.safetensors")
    assert main([*short, *sequence, "--checkpointing_steps", "1"]) == 0
    weights = load_file(tmp_path / "on" / "model.safetensors")
    assert (weights[RATES] != 0).all()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "on")
    assert model.config.level_learning.learned_rate and model.config.level_learning.rate == 0.1
    torch.testing.assert_close(model.model.layers[1].continuum.levels[0].rates.weight.detach(), weights[RATES])


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_two_processes_have_the_curve_of_one(rows, engine):
    found, _ = rows(engine)
    single, _ = rows("single")
    for own in found.values():
        same(own, single["hope"], 1e-4)


WRONG = {
    "llama": ([*LLAMA, "--level_learning", "sequence"], "trains the levels of a HOPE, and this is a llama"),
    "short": ([*HOPE, "--level_learning", "sequence"], "give rows of two pieces or more"),
    "carry": ([*SEQUENCE, "--document_boundary", "carry"], "use --document_boundary reset"),
    "compile": ([*SEQUENCE, "--torch_compile"], "leave --torch_compile out"),
}


@pytest.mark.parametrize("flags, sentence", WRONG.values(), ids=WRONG)
def test_runs_that_cannot_learn_are_refused(corpus, tmp_path, capsys, flags, sentence):
    assert main([*flags, *corpus, *SMALL, "--max_train_steps", "1", "--output_dir", str(tmp_path / "run")]) != 0
    assert sentence in capsys.readouterr().err
