"""Launch files: ours are short and valid for accelerate; settings without effect are refused in one sentence."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from accelerate.commands.config import cluster, config_args
from torch.distributed.fsdp import CPUOffload, ShardingStrategy

from hope_hf.common import launch_file
from hope_hf.common.launch_file import check
from hope_hf.common.run_arguments import Arguments
from hope_hf.optim import build_optimizer
from hope_hf.training.engines import zero
from hope_hf.training.engines.base import Engine
from hope_hf.training.engines.choose import check_mesh
from hope_hf.training.engines.fsdp1 import FSDP1
from hope_hf.training.engines.fsdp2 import classes_by_size
from hope_hf.training.engines.zero import Zero

CONFIGS = sorted((Path(__file__).parents[3] / "accelerate_configs").glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_our_files_fit_their_version(path):
    check(path, yaml.safe_load(path.read_text()))


def fsdp(version: int | None = 2, **keys) -> dict:
    config = {} if version is None else {"fsdp_version": version}
    return {"distributed_type": "FSDP", "num_processes": 2, "fsdp_config": config | keys}


# What accelerate ignores or does not take, and the key or value that the sentence names.
REFUSED = [
    (fsdp(fsdp_sharding_strategy="FULL_SHARD"), "fsdp_reshard_after_forward: true"),
    (fsdp(fsdp_backward_prefetch="BACKWARD_PRE"), "--fsdp_prefetch"),
    (fsdp(fsdp_use_orig_params=True), "fsdp_use_orig_params"),
    (fsdp(fsdp_reshard_after_forward="FULL_SHARD"), "true or false"),
    (fsdp(1, fsdp_reshard_after_forward=True), "fsdp_sharding_strategy: FULL_SHARD"),
    (fsdp(1, fsdp_use_orig_params=False), "write true"),
    (fsdp(None), "fsdp_version"),
    (fsdp(fsdp_ofload_params=True), "did you mean fsdp_offload_params?"),
    (fsdp(fsdp_auto_wrap_policy="SIZE_BASED_WRAP"), "fsdp_min_num_params"),
    (fsdp(fsdp_auto_wrap_policy="NO_WRAP"), "TRANSFORMER_BASED_WRAP"),
    (fsdp(fsdp_offload_params="maybe"), "true or false"),
    (fsdp(fsdp_min_num_params="lots"), "a whole number"),
    ({"distributed_type": "MULTI_CPU", "num_processes": 2}, "MULTI_GPU"),
    ({"parallelism_config": {"parallelism_config_tp_size": 2}}, "tensor parallelism"),
    ({"parallelism_config": 3}, "parallelism_config is 3"),
    ({"fsdp_config": [1]}, "fsdp_config is [1]"),
    ({"deepspeed_config": {"offload_param_device": "nvme"}}, "cpu"),
    ({"deepspeed_config": {"zero_stag": 3}}, "zero_stag"),
    ({"deepspeed_config": {"zero_stage": 0}}, "2 or 3"),
    ({"mixed_precision": "no", "deepspeed_config": {"deepspeed_config_file": "a", "zero_stage": 3}}, "zero_stage"),
]


@pytest.mark.parametrize(("content", "words"), REFUSED)
def test_a_key_without_effect_is_refused(content, words):
    with pytest.raises(ValueError) as caught:
        check(Path("own.yaml"), content)
    message = str(caught.value)
    assert message.startswith("own.yaml: ") and words in message and "\n" not in message


def answered_by_the_wizard(monkeypatch, answers: dict[str, object]) -> dict:
    """What `accelerate config` writes for these answers, each to the question that contains its words."""

    def answer(question, default):
        for words in answers:
            if words in question:
                return answers[words]
        return default

    def choose(question, choices=(), convert=None, default=None):
        value = answer(question, 0 if default is None else default)
        return value if convert is None or isinstance(value, str) else convert(value)

    monkeypatch.setattr(
        cluster, "_ask_field", lambda question, convert=None, default=None, **_: answer(question, default)
    )
    monkeypatch.setattr(cluster, "_ask_options", choose)
    return cluster.get_cluster_input().to_dict()


GPUS = {"type of machine": 4, "How many GPU": 2}
BLOCKS = GPUS | {"FullyShardedDataParallel": True, "layer class names": "HopeBlock"}
ANSWERS = {
    "single": {"type of machine": 0},
    "gpus": GPUS,
    "fsdp1": BLOCKS | {"FSDP version": 0},
    "fsdp2": BLOCKS,
    "fsdp2_offload": BLOCKS | {"resharding after forward": False, "offload parameters": True},
    "fsdp2_mesh": BLOCKS | {"parallelism config?": True, "replicate size": 2},
    "zero3": GPUS | {"use DeepSpeed?": True, "optimization stage": 3, "offload optimizer": 1, "clipping?": True},
}


@pytest.mark.parametrize("answers", ANSWERS.values(), ids=ANSWERS)
def test_files_of_the_wizard_of_accelerate_are_accepted(monkeypatch, answers):
    content = answered_by_the_wizard(monkeypatch, answers)
    assert bool(content.get("fsdp_config")) is ("FullyShardedDataParallel" in answers)
    check(Path("default_config.yaml"), content)


def test_values_may_be_quoted_or_left_to_deepspeed():
    check(Path("own.yaml"), fsdp(fsdp_offload_params="False", fsdp_min_num_params="1000000"))
    check(Path("own.yaml"), {"deepspeed_config": {"zero_stage": "3", "gradient_accumulation_steps": "auto"}})


MODULE = "python3.12 -u -X dev -m accelerate.commands.launch"


@pytest.mark.parametrize(
    ("words", "is_read"),
    [
        ("accelerate launch --config_file FILE run_clm.py", True),
        ("accelerate launch --config-file=FILE run_clm.py", True),
        (f"{MODULE} --config_file FILE -m hope_hf train", True),
        ("accelerate-launch --config_file FILE -m hope_hf train", True),
        ("wandb agent --config_file FILE", False),
        ("python -m sweep --config_file FILE", False),
        ("accelerate launch --cpu sweep.py --config_file FILE", False),
        # The default one of accelerate counts where no other is named and no flag chooses the engine.
        ("accelerate launch --num_processes 2 run_clm.py --fsdp_prefetch 1", True),
        (f"{MODULE} run_clm.py", True),
        ("torchrun run_clm.py", False),
        ("accelerate launch --multi_gpu run_clm.py", False),
        ("accelerate launch --use-fsdp --fsdp_version 2 run_clm.py", False),
    ],
)
def test_the_file_is_that_of_the_launchers_command_line(tmp_path, monkeypatch, words, is_read):
    file = tmp_path / "own.yaml"
    file.write_text("distributed_type: MULTI_CPU\nnum_processes: 2\n")
    content = words.replace("FILE", str(file)).replace(" ", "\0").encode()
    monkeypatch.setattr(config_args, "default_config_file", str(file))
    monkeypatch.setattr(Path, "read_bytes", lambda path: content)
    assert launch_file.launch_file() == (file if is_read else None)


def test_a_mesh_of_another_number_of_processes_is_refused(monkeypatch):
    for name, size in (("DP_REPLICATE", "2"), ("DP_SHARD", "2")):
        monkeypatch.setenv(f"PARALLELISM_CONFIG_{name}_SIZE", size)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="2 x 2 processes and 2 run"):
        check_mesh()
    monkeypatch.setenv("WORLD_SIZE", "4")
    check_mesh()


@pytest.mark.parametrize(("rank", "ignored"), [("0", ["--fsdp_prefetch", "fsdp_offload_params"]), ("1", [])])
def test_an_engine_says_once_what_it_ignores(rank, ignored, monkeypatch, recwarn):
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", "2")
    plugin = SimpleNamespace(
        sharding_strategy=ShardingStrategy.FULL_SHARD, use_orig_params=True, cpu_offload=CPUOffload(True),
        activation_checkpointing=False,
    )  # fmt: skip
    accelerator = SimpleNamespace(
        device=torch.device("cpu"), num_processes=2, mixed_precision="no", state=SimpleNamespace(fsdp_plugin=plugin)
    )
    FSDP1(accelerator, Arguments(output_dir="a", fsdp_prefetch=2))
    assert [str(warning.message).split(" ")[0] for warning in recwarn] == ignored


def test_muon_is_refused_where_matrices_are_cut_anywhere(tiny_model):
    assert FSDP1.flattens and Zero.flattens and not Engine.flattens

    class Cutting(Engine):
        name, flattens = "This engine", True

    model = tiny_model()
    muon = build_optimizer(model, "muon", 1e-3, 0.1, (0.9, 0.95), 1e-8, tokens_per_step=8)
    with pytest.raises(ValueError, match="This engine cuts them anywhere: launch with accelerate_configs/fsdp2.yaml"):
        Cutting().prepare(model, muon)


def test_wrapping_by_size_takes_blocks_and_their_parts(tiny_model):
    model = tiny_model()
    sizes = {}
    for module in model.model.layers[0].modules():
        sizes[type(module).__name__] = sum(parameter.numel() for parameter in module.parameters())
    chosen = classes_by_size(model, sizes["ContinuumLevel"] - 1)
    assert {"HopeBlock", "ContinuumMemory", "ContinuumLevel"} <= set(chosen)
    assert not {"ModuleList", "Linear", "InitialMemory", "HopeModel", "HopeForCausalLM"} & set(chosen)
    assert classes_by_size(model, sizes["HopeBlock"]) == []


@pytest.mark.parametrize(
    ("content", "flag"),
    [
        ('{"gradient_accumulation_steps": 4}', "--gradient_accumulation_steps is 1"),
        ('{"gradient_clipping": 0.5}', "--max_grad_norm is 1"),
        ('{"train_micro_batch_size_per_gpu": 3}', "--per_device_train_batch_size is 8"),
        ('{"optimizer": {"type": "Adam"}}', "brings optimizer"),
    ],
)
def test_a_deepspeed_file_that_contradicts_a_flag_is_refused(tmp_path, monkeypatch, content, flag):
    (tmp_path / "ds.json").write_text(content)
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", str(tmp_path / "ds.json"))
    with pytest.raises(ValueError, match=flag):
        zero._check_file(Arguments(output_dir=str(tmp_path)))
