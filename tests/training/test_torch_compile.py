"""`--torch_compile` changes how a run is computed, but not its results or how it ends."""

import json
import shutil

import pytest
import torch
from training_runs import HOPE, HOPE_ATTENTION, LLAMA, curve

# Inductor imports a deprecated part of torch.
pytestmark = [
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
]

# Rows hold documents of many lengths; logging at some steps only, so that hooks come and go.
STEPS = ["--block_size", "64", "--max_train_steps", "10", "--logging_steps", "3", "--eval_steps", "5"]
STEPS += ["--checkpointing_steps", "5", "--save_total_limit", "9"]
CARRY = ["--document_boundary", "carry"]
SYNTHETIC = ["--dataset_name", "synthetic"]


@pytest.fixture(autouse=True)
def few_compilations():
    """A function may be compiled for training and for evaluation, each with documents inside a row and without."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with torch._dynamo.config.patch(recompile_limit=4, fail_on_recompile_limit_hit=True):
        yield
    torch._dynamo.reset()


def compiled_graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.parametrize(
    "model, flags",
    [
        (HOPE, []),
        (HOPE, CARRY),
        (HOPE, ["--gradient_checkpointing"]),
        (HOPE, ["--gradient_checkpointing", "mixer"]),
        (HOPE_ATTENTION, ["--gradient_checkpointing", "mixer"]),
        (LLAMA, ["--gradient_checkpointing", "every:2"]),
        (HOPE, SYNTHETIC),
        (HOPE_ATTENTION, []),
        (LLAMA, []),
    ],
    ids=[
        "hope", "hope-carry", "hope-blocks", "hope-mixer", "attention-mixer", "llama-every", "hope-synthetic",
        "hope-attention", "llama",
    ],  # fmt: skip
)
def test_a_compiled_run_has_the_figures_of_the_plain_one(run, corpus, capsys, model, flags):
    data = [] if flags == SYNTHETIC else corpus
    _, plain = run("plain", *STEPS, *flags, model=model, data=data)
    assert compiled_graphs() == 0
    status, compiled = run("compiled", *STEPS, *flags, "--torch_compile", model=model, data=data)
    assert status == 0 and compiled_graphs() > 0
    for key in ("train/loss", "train/grad_norm", "eval/loss"):
        assert curve(compiled, key) == pytest.approx(curve(plain, key), rel=1e-4), key
    samples = [part.split("\n\n")[0] for part in capsys.readouterr().out.split("A sampled continuation")[1:]]
    assert len(samples) == 2 and samples[0] == samples[1]


def test_a_compiled_run_continues(run, tmp_path, capsys):
    _, whole = run("a", *STEPS, *CARRY, "--torch_compile", model=HOPE)
    # As after a kill after step 5.
    shutil.rmtree(tmp_path / "a" / "checkpoint-10")
    record = json.loads((tmp_path / "a" / "run.json").read_text())
    (tmp_path / "a" / "run.json").write_text(json.dumps({**record, "complete": False}))
    torch._dynamo.reset()
    status, continued = run("a", *STEPS, *CARRY, "--torch_compile", model=HOPE)
    assert status == 0 and "at step 5" in capsys.readouterr().out
    assert [row["step"] for row in continued] == [row["step"] for row in whole]
    assert curve(continued) == pytest.approx(curve(whole), rel=1e-6)
