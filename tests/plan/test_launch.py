"""Launch files as the planner reads them."""

import os
from pathlib import Path

import pytest
import yaml

from hope_hf.plan.launch import ALL, STRATEGIES, read_launch_file

CONFIGS = Path(__file__).parents[2] / "accelerate_configs"
# By file: strategy, engine, processes and parts of a replica.
EXPECTED = {
    "single.yaml": ("ddp", "plain", 1, 1),
    "single_bf16.yaml": ("ddp", "plain", 1, 1),
    "ddp.yaml": ("ddp", "plain", 2, 1),
    "fsdp1.yaml": ("full_shard", "fsdp1", 2, 2),
    "fsdp2.yaml": ("full_shard", "fsdp2", 2, 2),
    "fsdp_hybrid.yaml": ("hybrid_shard", "fsdp2", 4, 2),
    "fsdp_offload.yaml": ("fsdp_offload", "fsdp2", 2, 2),
    "multi_node_fsdp.yaml": ("full_shard", "fsdp2", 4, 4),
    "deepspeed_zero2.yaml": ("zero2", "deepspeed", 2, 2),
    "deepspeed_zero3.yaml": ("zero3", "deepspeed", 2, 2),
    "deepspeed_zero3_offload.yaml": ("zero3_offload", "deepspeed", 2, 2),
}


def read(path, world_size=None):
    return read_launch_file(str(path), world_size, gradient_accumulation_steps=1)


def test_launch_files_of_the_repository():
    launches = {}
    for path in CONFIGS.glob("*.yaml"):
        launch = read(path, 4 if path.name == "multi_node_fsdp.yaml" else None)
        launches[path.name] = launch.strategy.key, launch.strategy.engine, launch.world_size, launch.parts
        assert launch.precision == ("bf16" if "bf16" in path.name else "no")
    assert launches == EXPECTED
    assert {strategy.launch_file for strategy in STRATEGIES.values()} - {None} <= launches.keys()
    assert read(CONFIGS / "fsdp2.yaml", 1024).parts == 1024 and read_launch_file(None, 8, 1).strategy.key == "ddp"


def changed(folder: Path, name: str, section: str | None = None, **keys) -> Path:
    """A copy of a launch file with other values."""
    content = yaml.safe_load((CONFIGS / name).read_text())
    (content if section is None else content.setdefault(section, {})).update(keys)
    (folder / name).write_text(yaml.safe_dump(content))
    return folder / name


def test_settings_inside_the_files(tmp_path):
    kept = read(changed(tmp_path, "fsdp2.yaml", "fsdp_config", fsdp_reshard_after_forward=False)).strategy
    assert kept.key == "shard_grad_op" and kept.keeps_gathered
    old = read(changed(tmp_path, "fsdp1.yaml", "fsdp_config", fsdp_sharding_strategy="SHARD_GRAD_OP")).strategy
    assert (old.key, old.engine) == ("shard_grad_op", "fsdp1")
    assert read(changed(tmp_path, "fsdp1.yaml", "fsdp_config", fsdp_sharding_strategy="NO_SHARD")).parts == 1
    assert read(changed(tmp_path, "fsdp2.yaml", "fsdp_config", fsdp_activation_checkpointing=True)).checkpointing
    partly = read(changed(tmp_path, "deepspeed_zero2.yaml", "deepspeed_config", offload_optimizer_device="cpu"))
    assert partly.strategy.offloads < ALL
    assert read(changed(tmp_path, "ddp.yaml", use_cpu=True)).on_cpu and not read(CONFIGS / "ddp.yaml").on_cpu


@pytest.mark.parametrize(
    ("change", "world_size", "named"),
    [
        (("single.yaml", None, {}), 2, "--world_size is 2"),
        (("fsdp2.yaml", None, {}), 1, "two processes"),
        (("fsdp_hybrid.yaml", None, {}), 6, "2 x 2 processes"),
        (("fsdp2.yaml", None, {"distributed_type": "XLA"}), None, "distributed_type is XLA"),
        (("fsdp2.yaml", None, {"mixed_precision": "fp8"}), None, "mixed_precision is fp8"),
        (("fsdp2.yaml", None, {"num_processes": "two"}), None, "num_processes"),
        (("fsdp2.yaml", None, {"num_processes": 10**7}), None, "num_processes is 10000000"),
        (("fsdp2.yaml", None, {"num_proceses": 2}), None, "did you mean num_processes"),
        (("fsdp2.yaml", "fsdp_config", {"fsdp_version": [2]}), None, "fsdp_version"),
        # what the trainer's own check refuses
        (("fsdp2.yaml", "fsdp_config", {"fsdp_sharding_strategy": "FULL_SHARD"}), None, "version 1"),
        (("deepspeed_zero2.yaml", "deepspeed_config", {"gradient_accumulation_steps": 3}), None, "leave the key out"),
        (("deepspeed_zero2.yaml", "deepspeed_config", {"zero_stage": 1}), None, "2 or 3"),
    ],
)
def test_what_contradicts_itself_is_one_sentence(tmp_path, change, world_size, named):
    name, section, keys = change
    with pytest.raises(ValueError, match=named) as error:
        read(changed(tmp_path, name, section, **keys), world_size)
    assert name in str(error.value) and "\n" not in str(error.value)


def test_files_that_are_no_launch_files(tmp_path):
    file = tmp_path / "x.yaml"
    for text in ("[1", "- a", "\0", "a: b: c", "zzz: 1", "num_processes: 1", "[" * 10**5):
        file.write_text(text)
        with pytest.raises(ValueError, match="x.yaml"):
            read(file)
    os.mkfifo(tmp_path / "pipe.yaml")
    for name in ("missing.yaml", "pipe.yaml"):
        with pytest.raises(ValueError, match=f"{name} cannot be read"):
            read(tmp_path / name)
    with pytest.raises(ValueError, match="is no key of a launch file"):
        read(CONFIGS.parent / "recipes/mid.yaml")
