"""Launch files as the planner reads them."""

import os
from pathlib import Path

import pytest
import yaml

from hope_hf.plan.launch import ALL, STRATEGIES, read_launch_file

CONFIGS = Path(__file__).parents[2] / "accelerate_configs"
EXPECTED = {
    "single.yaml": ("ddp", 1, 1, "no"),
    "single_bf16.yaml": ("ddp", 1, 1, "bf16"),
    "ddp.yaml": ("ddp", 2, 1, "no"),
    "fsdp1.yaml": ("full_shard", 2, 2, "no"),
    "fsdp2.yaml": ("full_shard", 2, 2, "no"),
    "fsdp_hybrid.yaml": ("hybrid_shard", 4, 2, "no"),
    "fsdp_offload.yaml": ("fsdp_offload", 2, 2, "no"),
    "multi_node_fsdp.yaml": ("full_shard", None, None, None),
    "deepspeed_zero2.yaml": ("zero2", 2, 2, "no"),
    "deepspeed_zero3.yaml": ("zero3", 2, 2, "no"),
    "deepspeed_zero3_offload.yaml": ("zero3_offload", 2, 2, "no"),
}


def read(path, world_size=None, accumulation=1):
    return read_launch_file(str(path), world_size, accumulation)


def test_every_launch_file_is_expected():
    assert {path.name for path in CONFIGS.glob("*.yaml")} == set(EXPECTED)
    named = {strategy.launch_file for strategy in STRATEGIES.values()} - {None}
    assert named <= set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_launch_files_of_the_repository(name):
    launch = read(CONFIGS / name)
    key, world, parts, precision = EXPECTED[name]
    assert launch.strategy.key == key
    assert launch.strategy.engine == {"fsdp1.yaml": "fsdp1"}.get(name, STRATEGIES[key].engine)
    if world is not None:
        assert (launch.world_size, launch.parts, launch.precision) == (world, parts, precision)


def test_the_number_of_processes_may_be_another():
    assert read(CONFIGS / "fsdp2.yaml", 1024).parts == 1024
    assert read_launch_file(None, 8, 1).strategy.key == "ddp"


def changed(tmp_path, name: str, section: str | None = None, **keys) -> Path:
    content = yaml.safe_load((CONFIGS / name).read_text())
    (content if section is None else content.setdefault(section, {})).update(keys)
    path = tmp_path / name
    path.write_text(yaml.safe_dump(content))
    return path


def test_settings_inside_the_files(tmp_path):
    keeps = read(changed(tmp_path, "fsdp2.yaml", "fsdp_config", fsdp_reshard_after_forward=False))
    assert keeps.strategy.key == "shard_grad_op" and keeps.strategy.keeps_gathered
    old = read(changed(tmp_path, "fsdp1.yaml", "fsdp_config", fsdp_sharding_strategy="SHARD_GRAD_OP"))
    assert (old.strategy.key, old.strategy.engine) == ("shard_grad_op", "fsdp1")
    assert read(changed(tmp_path, "fsdp1.yaml", "fsdp_config", fsdp_sharding_strategy="NO_SHARD")).parts == 1
    assert read(changed(tmp_path, "fsdp2.yaml", "fsdp_config", fsdp_activation_checkpointing=True)).checkpointing
    partly = read(changed(tmp_path, "deepspeed_zero2.yaml", "deepspeed_config", offload_optimizer_device="cpu"))
    assert partly.strategy.offloads < ALL


@pytest.mark.parametrize(
    ("change", "world_size", "sentence"),
    [
        (("single.yaml", None, {}), 2, "starts one process"),
        (("fsdp2.yaml", None, {}), 1, "needs two processes"),
        (("fsdp_hybrid.yaml", None, {}), 6, "2 x 2 processes"),
        (("fsdp2.yaml", None, {"distributed_type": "XLA"}), None, "distributed_type is XLA"),
        (("fsdp2.yaml", None, {"mixed_precision": "fp8"}), None, "mixed_precision is fp8"),
        (("fsdp2.yaml", None, {"num_processes": "two"}), None, "num_processes"),
        (("fsdp2.yaml", None, {"num_processes": 10**7}), None, "num_processes is 10000000: write a whole number from"),
        (("fsdp2.yaml", None, {"num_processes": -1}), None, "num_processes is -1"),
        (("fsdp1.yaml", None, {"num_machines": "two"}), None, "num_machines is 'two'"),
        (("fsdp2.yaml", None, {"num_proceses": 2}), None, "did you mean num_processes"),
        (("fsdp2.yaml", None, {"mixed_precision": ["no"]}), None, "mixed_precision is"),
        (("fsdp2.yaml", "fsdp_config", {"fsdp_version": [2]}), None, "fsdp_version is .* one value"),
        # What the trainer's own check refuses.
        (("fsdp2.yaml", "fsdp_config", {"fsdp_sharding_strategy": "FULL_SHARD"}), None, "version 1"),
        (("fsdp2.yaml", "fsdp_config", {"fsdp_ofload_params": True}), None, "did you mean fsdp_offload_params"),
        (("deepspeed_zero2.yaml", "deepspeed_config", {"gradient_accumulation_steps": 3}), None, "leave the key out"),
        (("deepspeed_zero2.yaml", "deepspeed_config", {"zero_stage": 1}), None, "write 2 or 3"),
    ],
)
def test_what_contradicts_itself_is_one_sentence(tmp_path, change, world_size, sentence):
    name, section, keys = change
    with pytest.raises(ValueError, match=sentence) as error:
        read(changed(tmp_path, name, section, **keys), world_size)
    assert name in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["[1", "- a", "\0", "a: b: c"])
def test_files_that_are_no_launch_files(tmp_path, text):
    (tmp_path / "x.yaml").write_text(text)
    with pytest.raises(ValueError, match="x.yaml"):
        read(tmp_path / "x.yaml")
    with pytest.raises(ValueError, match="cannot be read"):
        read(tmp_path / "missing.yaml")


def test_a_pipe_and_other_yaml_files_are_no_launch_files(tmp_path):
    os.mkfifo(tmp_path / "pipe.yaml")
    with pytest.raises(ValueError, match="pipe.yaml cannot be read: it is not a regular file"):
        read(tmp_path / "pipe.yaml")
    mixtures = sorted((CONFIGS.parent / "recipes").rglob("*.yaml"))
    assert len(mixtures) > 8
    for path in mixtures:
        with pytest.raises(ValueError, match="is no key of a launch file"):
            read(path)
    wrong = {"zzz: 1": "zzz is no key", "num_processes: 1": "no distributed_type", "[" * 10**5: "deep"}
    for text, said in wrong.items():
        (tmp_path / "x.yaml").write_text(text)
        with pytest.raises(ValueError, match=f"x.yaml.*{said}"):
            read(tmp_path / "x.yaml")
