"""A checkpoint holds the whole run, which continues from it bit for bit, only in a model that fits."""

import json
import random
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoint_run import CONFIG, MARK, Run, forge, names
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from hope_hf.training.checkpoints.manifest import describe, publish, read_manifest, temporary_name, verify
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


def test_nothing_is_pickled_and_every_file_is_in_the_manifest(output_dir):
    folder = output_dir / "checkpoint-5"
    assert {path.suffix for path in folder.iterdir()} <= {".json", ".safetensors"}
    assert {*verify(folder).files, "manifest.json"} == set(names(folder))


@pytest.mark.parametrize("tied", [True, False])
def test_the_folder_loads_with_the_auto_classes(tmp_path, tied):
    run = Run(tie_word_embeddings=tied)
    folder = run.save(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert AutoTokenizer.from_pretrained(folder)("hope")["input_ids"] == [1]
    for (name, a), (_, b) in zip(run.model.named_parameters(), model.named_parameters(), strict=True):
        assert torch.equal(a, b), name
    fresh = Run(seed=3, tie_word_embeddings=tied).model
    load_weights(fresh, read_manifest(folder))
    assert torch.equal(fresh.lm_head.weight, run.model.lm_head.weight)


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


def test_weights_in_several_files(tmp_path):
    run = Run()
    unfinished = temporary_name(tmp_path, 1, MARK)
    run.model.save_pretrained(unfinished, max_shard_size="5KB")
    assert len(list(unfinished.glob("*.safetensors"))) > 1
    facts = {"num_processes": 1, "only_model": True}
    folder = publish(unfinished, 1, facts, describe(unfinished, list(unfinished.iterdir())), MARK)
    fresh = Run(seed=3).model
    load_weights(fresh, read_manifest(folder))
    assert all(torch.equal(a, b) for a, b in zip(run.model.parameters(), fresh.parameters(), strict=True))


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


def test_a_missing_tensor_is_refused(output_dir):
    file = output_dir / "checkpoint-5" / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.norm.weight"]
    save_file(tensors, file)
    with pytest.raises(ValueError, match="model.norm.weight is only in the model: repeat the flags"):
        load_weights(Run().model, read_manifest(file.parent))


def resealed(folder: Path, name: str, change) -> None:
    """Change the content of a checkpoint's file, and seal the checkpoint as if a run had written it."""
    file = folder / name
    if name.endswith(".json"):
        content = json.loads(file.read_text())
        change(content)
        file.write_text(json.dumps(content))
    else:
        content = load_file(file)
        change(content)
        save_file(content, file)
    forge(folder, files={**read_manifest(folder).files, **describe(folder, [file])})


def group(**values):
    """A change of the groups with AdamW."""
    return lambda groups: [entry.update(values) for entry in groups if entry["optimizer"] == "adamw"]


def tensors(kind: str, value: float):
    return lambda content: [tensor.fill_(value) for name, tensor in content.items() if name.endswith(f":{kind}")]


def scalar(name: str, value: object):
    return lambda content: [entry["scalars"].update({name: value}) for entry in content.values()]


@pytest.mark.parametrize(
    "name, change, said",
    [
        ("optimizer.json", group(betas=[1.5, 0.95]), "optimizer.json has betas [1.5, 0.95] and this run [0.9, 0.95]"),
        ("optimizer.json", group(initial_lr=1e30), "optimizer.json has initial_lr 1e+30 and this run 0.01"),
        ("optimizer.json", group(eps="a"), "optimizer.json has eps a and this run 1e-08"),
        ("optimizer.json", lambda groups: groups[0].pop("lr"), "no state of this run ('lr' is missing)"),
        ("optimizer_rank_0.safetensors", tensors("exp_avg", float("nan")), "optimizer_rank_0.* holds a exp_avg of"),
        ("optimizer_rank_0.safetensors", tensors("exp_avg", 1e38), "optimizer_rank_0.* holds a exp_avg of"),
        ("optimizer_rank_0.safetensors", tensors("exp_avg_sq", -1.0), "optimizer_rank_0.* holds a exp_avg_sq of"),
        ("optimizer_rank_0.safetensors", tensors("momentum_buffer", 1e38), "optimizer_rank_0.* holds a momentum_"),
        ("optimizer_rank_0.safetensors", dict.popitem, "no state of this run"),
        ("optimizer_rank_0.json", scalar("step", -1), "optimizer_rank_0.* holds a step of"),
        ("optimizer_rank_0.json", scalar("step", float("nan")), "optimizer_rank_0.* holds a step of"),
        ("optimizer_rank_0.json", scalar("step", "a"), "optimizer_rank_0.* holds a step of"),
        ("optimizer_rank_0.json", dict.popitem, "no state of this run"),
    ],
)
def test_an_optimizer_that_no_step_has_left_is_refused(output_dir, name, change, said):
    resealed(output_dir / "checkpoint-5", name, change)
    with pytest.raises(ValueError, match=re.escape(said)) as caught:
        Run().restore(output_dir)
    assert str(output_dir / "checkpoint-5") in str(caught.value)
    assert "resume from another checkpoint" in str(caught.value)


def halve_optimizer(folder: Path) -> None:
    """Write the optimizer of one process as two would that hold half of every parameter."""
    whole = load_file(folder / "optimizer_rank_0.safetensors")
    entries = json.loads((folder / "optimizer_rank_0.json").read_text())
    halves = {name: entry["numel"] // 2 for name, entry in entries.items()}
    parts = {0: {}, 1: {}}
    for stored, tensor in whole.items():
        half = halves[stored.rpartition(":")[0]]
        parts[0][stored], parts[1][stored] = tensor[:half].clone(), tensor[half:].clone()
    for rank, tensors_of_rank in parts.items():
        starts = {name: entry | {"start": rank * halves[name]} for name, entry in entries.items()}
        save_file(tensors_of_rank, folder / f"optimizer_rank_{rank}.safetensors")
        (folder / f"optimizer_rank_{rank}.json").write_text(json.dumps(starts))
    written = sorted(folder.glob("optimizer_rank_*"))
    forge(folder, files={**read_manifest(folder).files, **describe(folder, written)})


def test_an_optimizer_that_two_processes_have_shared_is_read_bit_for_bit(tmp_path):
    run = Run()
    run.train(6)
    halve_optimizer(run.save(tmp_path))
    expected = run.train(6)
    resumed = Run(seed=7)
    resumed.restore(tmp_path)
    assert resumed.train(6) == expected


def begin_one_later(entries: dict) -> None:
    for entry in entries.values():
        entry["start"] = 1


def test_a_slice_beyond_its_parameter_is_refused(output_dir):
    resealed(output_dir / "checkpoint-5", "optimizer_rank_0.json", begin_one_later)
    with pytest.raises(ValueError, match="optimizer_rank_0.safetensors is no state of this run .*it has a tensor"):
        Run().restore(output_dir)
