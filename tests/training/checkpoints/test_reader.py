"""A checkpoint holds the whole run, which continues from it bit for bit, only in a model that fits."""

import random

import numpy as np
import pytest
import torch
from checkpoint_run import CONFIG, Run
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from hope_hf.training.checkpoints.manifest import read_manifest
from hope_hf.training.checkpoints.reader import find_checkpoint
from hope_hf.training.checkpoints.weights import load_weights

pytestmark = pytest.mark.usefixtures("one_cpu_process")


def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(tmp_path):
    random.seed(1), np.random.seed(2)
    run = Run()
    run.train(6)
    run.save(tmp_path)
    expected = run.train(6)

    random.seed(8), np.random.seed(9)
    resumed = Run(seed=7)
    resumed.train(1)
    saved = resumed.restore(tmp_path)
    assert (saved.step, saved.path) == (6, tmp_path / "checkpoint-6")
    assert saved.state["trainer"] == {"step": 6, "loss_sum": 0.1 + 0.2, "best": None}
    assert saved.state["rank"]["data"] == {"rows": 8, "positions": [3, 5]}
    assert saved.state["rank"]["carried"] == {}
    assert resumed.train(6) == expected
    for (name, a), (_, b) in zip(run.model.named_parameters(), resumed.model.named_parameters(), strict=True):
        assert torch.equal(a, b), name
    assert resumed.optimizer.level_report() == run.optimizer.level_report()


def test_carried_memories_come_back_as_they_were(tmp_path):
    whole = torch.randn(4, 6)
    carried = {
        "all": whole,
        "columns": whole[:, :3],
        "rows": whole[2:],
        "same": whole,
        "half": torch.randn(2).bfloat16(),
        "count": torch.tensor(3),
    }
    Run().save(tmp_path, carried=carried)
    found = find_checkpoint(tmp_path, None).state["rank"]["carried"]
    assert found.keys() == carried.keys()
    for name, tensor in carried.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)


def test_a_family_that_renames_its_weights_for_export_continues(tmp_path):
    """Mixtral's experts are stacked in the model and separate in the files of the Hub."""
    config = AutoConfig.for_model("mixtral", **CONFIG | {"num_local_experts": 2, "num_key_value_heads": 2})
    torch.manual_seed(0)
    model, fresh = AutoModelForCausalLM.from_config(config), AutoModelForCausalLM.from_config(config)
    run = Run()
    run.engine.model = model
    folder = run.save(tmp_path)
    load_weights(fresh, read_manifest(folder))
    for (name, a), (_, b) in zip(model.named_parameters(), fresh.named_parameters(), strict=True):
        assert torch.equal(a, b), name
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), loaded.parameters(), strict=True))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"hidden_size": 32}, r"lm_head.weight is float32 \[32, 16\] in the checkpoint and float32 \[32, 32\]"),
        ({"num_hidden_layers": 1}, "model.layers.1.* is only in the checkpoint"),
        ({"num_hidden_layers": 3}, "model.layers.2.* is only in the model"),
        ({"dtype": "bfloat16"}, "in the checkpoint and bfloat16"),
    ],
)
def test_another_model_is_refused_untouched(output_dir, change, said):
    model = AutoModelForCausalLM.from_config(LlamaConfig(**CONFIG | change))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with pytest.raises(ValueError, match=said):
        load_weights(model, read_manifest(output_dir / "checkpoint-5"))
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
