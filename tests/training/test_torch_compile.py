"""`--torch_compile` changes how a run is computed, but not its results or how it ends."""

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


RUNS = {
    "hope": (HOPE, []),
    "hope-carry": (HOPE, ["--document_boundary", "carry"]),
    "hope-mixer": (HOPE, ["--gradient_checkpointing", "mixer"]),
    "hope-synthetic": (HOPE, SYNTHETIC),
    "attention-mixer": (HOPE_ATTENTION, ["--gradient_checkpointing", "mixer"]),
    "llama-every": (LLAMA, ["--gradient_checkpointing", "every:2"]),
}


@pytest.mark.parametrize("model, flags", RUNS.values(), ids=RUNS)
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
