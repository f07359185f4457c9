"""Launch files: ours are short and valid for accelerate; settings without effect are refused in one sentence."""

import os
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from accelerate.commands.config import cluster, config_args
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import prepare_multi_gpu_env
from accelerate.utils.constants import FSDP_SHARDING_STRATEGY
from torch.distributed.fsdp import CPUOffload, ShardingStrategy

from hope_hf.common import launch_file
from hope_hf.common.launch_file import check
from hope_hf.common.run_arguments import Arguments
from hope_hf.optim import build_optimizer
from hope_hf.training.engines import zero
from hope_hf.training.engines.base import Engine
from hope_hf.training.engines.choose import check_mesh, plain_name
from hope_hf.training.engines.fsdp1 import FSDP1
from hope_hf.training.engines.fsdp2 import classes_by_size
from hope_hf.training.engines.zero import Zero

CONFIGS = sorted((Path(__file__).parents[3] / "accelerate_configs").glob("*.yaml"))
NAMES = """single single_bf16 ddp fsdp2 fsdp1 fsdp_hybrid fsdp_offload deepspeed_zero2 deepspeed_zero3
deepspeed_zero3_offload multi_node_fsdp""".split()
CHANGEABLE = "num_processes mixed_precision fsdp_reshard_after_forward fsdp_auto_wrap_policy fsdp_offload_params"


def test_there_are_these_files():
    assert sorted(path.stem for path in CONFIGS) == sorted(NAMES)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_our_files_are_short_explained_and_fit_their_version(path):
    lines = path.read_text().splitlines()
    assert len(lines) <= 40 and max(map(len, lines)) <= 119
    check(path, yaml.safe_load(path.read_text()))
    for above, line in zip(lines, lines[1:], strict=False):
        key = line.strip().split(":")[0]
        # A single process has nothing to choose here.
        if key in CHANGEABLE.split() and line.strip() != "num_processes: 1":
            assert above.strip().startswith("#"), f"{path.name} does not explain {key}"


def fsdp(version: int | None = 2, **keys) -> dict:
    config = {} if version is None else {"fsdp_version": version}
    return {"distributed_type": "FSDP", "num_processes": 2, "fsdp_config": config | keys}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (fsdp(fsdp_sharding_strategy="FULL_SHARD"), "version 2 ignores: write fsdp_reshard_after_forward: true"),
        (fsdp(fsdp_backward_prefetch="BACKWARD_PRE"), "give --fsdp_prefetch N"),
        (fsdp(fsdp_forward_prefetch=False), "give --fsdp_prefetch N"),
        (fsdp(fsdp_use_orig_params=True), "fsdp_use_orig_params is a key of FSDP's version 1"),
        (fsdp(fsdp_sync_module_states=True), "all processes make the same model"),
        (fsdp(fsdp_reshard_after_forward="FULL_SHARD"), "is FULL_SHARD: write true or false"),
        (fsdp(1, fsdp_reshard_after_forward=True), "version 1: write fsdp_sharding_strategy: FULL_SHARD"),
        (fsdp(1, fsdp_reshard_after_forward=False), "version 1: write fsdp_sharding_strategy: SHARD_GRAD_OP"),
        (fsdp(1, fsdp_reshard_after_forward="SHARD_GRAD_OP"), "write fsdp_sharding_strategy: SHARD_GRAD_OP"),
        (fsdp(1, fsdp_reshard_after_forward="HYBRID_SHARD"), "write fsdp_sharding_strategy: HYBRID_SHARD"),
        (fsdp(1, fsdp_use_orig_params=False), "level clocks need the original parameters: write true"),
        (fsdp(None), "names no fsdp_version"),
        (
            fsdp(fsdp_ofload_params=True),
            "ignores fsdp_ofload_params in fsdp_config; did you mean fsdp_offload_params?",
        ),
        (fsdp(fsdp_auto_wrap_policy="SIZE_BASED_WRAP"), "write fsdp_min_num_params: 1000000"),
        (fsdp(fsdp_auto_wrap_policy="NO_WRAP"), "write fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP"),
        ({"distributed_type": "MULTI_CPU", "num_processes": 2}, "starts a single process: write MULTI_GPU"),
        ({"parallelism_config": {"parallelism_config_tp_size": 2}}, "tensor parallelism is not supported"),
        ({"deepspeed_config": {"offload_param_device": "nvme"}}, "is nvme, which is not supported: write cpu"),
        ({"deepspeed_config": {"zero_stag": 3}}, "ignores zero_stag in deepspeed_config"),
        ({"fsdp_config": [1]}, "fsdp_config is [1]: write it as indented lines of the form 'key: value'"),
        ({"fsdp_config": {1: 2}}, "accelerate ignores 1 in fsdp_config: leave it out"),
        ({"parallelism_config": 3}, "parallelism_config is 3: write it as indented lines"),
        (fsdp(fsdp_offload_params="maybe"), "fsdp_offload_params is maybe: write true or false"),
        (fsdp(fsdp_min_num_params="lots"), "fsdp_min_num_params is lots: write a whole number"),
        ({"parallelism_config": {"parallelism_config_tp_size": "auto"}}, "tp_size is auto: write a whole number"),
        ({"deepspeed_config": {"zero_stage": 7}}, "zero_stage is 7: write 2 or 3, or take"),
        ({"deepspeed_config": {"zero_stage": 0}}, "zero_stage is 0: write 2 or 3"),
        ({"deepspeed_config": {"zero3_init_flag": "no way"}}, "zero3_init_flag is no way: write true or false"),
        (
            {"mixed_precision": "no", "deepspeed_config": {"deepspeed_config_file": "ds.json", "zero_stage": 3}},
            "mixed_precision, zero_stage may not be given with deepspeed_config_file",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_key_without_effect_is_refused(content, said):
    with pytest.raises(ValueError) as caught:
        check(Path("own.yaml"), content)
    assert str(caught.value).startswith("own.yaml: ") and said in str(caught.value)
    assert str(caught.value)[-1] in ".?" and "\n" not in str(caught.value)


def wizard(monkeypatch, *answers: tuple[str, object]) -> dict:
    """What `accelerate config` writes for these answers, each to the question that contains its words.

    Other questions get the default, or the first choice where there is none.
    """
    left = list(answers)

    def given(question, default):
        asked = next((answer for answer in left if answer[0] in question), None)
        if asked is None:
            return default
        left.remove(asked)
        return asked[1]

    def field(question, convert=None, default=None, **_):
        return given(question, default)

    def options(question, choices=(), convert=None, default=None):
        value = given(question, 0 if default is None else default)
        return value if convert is None or isinstance(value, str) else convert(value)

    monkeypatch.setattr(cluster, "_ask_field", field)
    monkeypatch.setattr(cluster, "_ask_options", options)
    config = cluster.get_cluster_input()
    assert not left, f"nobody asked about {left}"
    return config.to_dict()


GPUS = ("type of machine", 4), ("How many GPU", 2)
USE_FSDP, BLOCKS = ("FullyShardedDataParallel", True), ("layer class names", "HopeBlock")


@pytest.mark.parametrize(
    "answers",
    [
        [("type of machine", 0)],
        [("type of machine", 0), ("CPU only", True)],
        GPUS,
        [*GPUS, USE_FSDP, BLOCKS, ("FSDP version", 0)],
        [*GPUS, USE_FSDP, ("FSDP version", 0), ("auto wrap policy", 1), ("use_orig_params", True)],
        [*GPUS, USE_FSDP, BLOCKS],
        [*GPUS, USE_FSDP, BLOCKS, ("resharding after forward", False), ("offload parameters", True)],
        [*GPUS, USE_FSDP, BLOCKS, ("parallelism config?", True), ("replicate size", 2)],
        [*GPUS, ("use DeepSpeed?", True)],
        [*GPUS, ("use DeepSpeed?", True), ("optimization stage", 3), ("offload optimizer", 1), ("clipping?", True)],
    ],
    ids="single cpu gpus fsdp1 fsdp1_by_size fsdp2 fsdp2_offload fsdp2_mesh zero2 zero3_offload".split(),
)
def test_files_of_the_wizard_of_accelerate_are_accepted(monkeypatch, answers):
    content = wizard(monkeypatch, *answers)
    assert ("fsdp_config" in content) == (USE_FSDP in answers) or not content["fsdp_config"]
    check(Path("default_config.yaml"), content)


@pytest.mark.parametrize("strategy", ["SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD"])
def test_the_wizard_writes_strategies_of_version_1_where_the_launcher_ignores_them(monkeypatch, strategy):
    chosen = ("sharding strategy", FSDP_SHARDING_STRATEGY.index(strategy))
    answers = *GPUS, USE_FSDP, BLOCKS, ("FSDP version", 0), chosen
    with pytest.raises(ValueError, match=f"is ignored under .* write fsdp_sharding_strategy: {strategy}"):
        check(Path("default_config.yaml"), wizard(monkeypatch, *answers))


def test_values_may_be_quoted_or_left_to_deepspeed():
    check(Path("own.yaml"), fsdp(fsdp_offload_params="False", fsdp_min_num_params="1000000"))
    check(Path("own.yaml"), {"deepspeed_config": {"zero_stage": "3", "gradient_accumulation_steps": "auto"}})


def test_the_file_is_found_on_the_command_line_of_the_launcher(tmp_path, monkeypatch):
    file = tmp_path / "own.yaml"
    file.write_text("distributed_type: MULTI_CPU\nnum_processes: 2\n")
    read = Path.read_bytes

    def command_line(words):
        content = "\0".join(words).encode()
        mine = f"/proc/{os.getppid()}/cmdline"
        monkeypatch.setattr(Path, "read_bytes", lambda path: content if str(path) == mine else read(path))

    command_line(["accelerate", "launch", "--config_file", str(file), "run_clm.py"])
    with pytest.raises(ValueError, match="MULTI_CPU starts a single process"):
        launch_file.check_launch_file()
    command_line(["accelerate", "launch", f"--config-file={file}", "run_clm.py"])
    assert launch_file.launch_file() == file
    for launcher in (["python3.12", "-u", "-X", "dev", "-m", "accelerate.commands.launch"], ["accelerate-launch"]):
        command_line([*launcher, "--config_file", str(file), "-m", "hope_hf", "train"])
        assert launch_file.launch_file() == file


@pytest.mark.parametrize(
    "words",
    [
        "bash", "", "python", "wandb agent --config_file", "python accelerated/sweep.py --config_file",
        "python -m sweep --config_file", "accelerate launch --cpu sweep.py --config_file",
    ],
)  # fmt: skip
def test_the_config_file_of_another_program_is_none(tmp_path, monkeypatch, words):
    file = tmp_path / "sweep.yaml"
    file.write_text("lr: [1, 2]\n")
    monkeypatch.setattr(Path, "read_bytes", lambda path: "\0".join([*words.split(" "), str(file)]).encode())
    assert launch_file.launch_file() is None


@pytest.mark.parametrize(
    "launcher", [["python", "/bin/accelerate", "launch"], ["python", "-m", "accelerate.commands.launch"]]
)
def test_without_a_file_the_default_one_of_accelerate_counts(tmp_path, monkeypatch, launcher):
    file = tmp_path / "default_config.yaml"
    monkeypatch.setattr(config_args, "default_config_file", str(file))

    def found(*words):
        content = "\0".join(words).encode()
        with monkeypatch.context() as patch:
            patch.setattr(Path, "read_bytes", lambda path: content)
            return launch_file.launch_file()

    assert found(*launcher, "run_clm.py") is None
    file.write_text("distributed_type: FSDP\n")
    assert found(*launcher, "--num_processes", "2", "run_clm.py", "--fsdp_prefetch", "1") == file
    assert found("torchrun", "run_clm.py") is None
    # Then the command line chooses the engine.
    for words in (["--cpu"], ["--multi_gpu"], ["--use-fsdp", "--fsdp_version", "2"], ["--use_deepspeed"]):
        assert found(*launcher, *words, "run_clm.py") is None


def test_the_card_tells_who_starts_with_torchrun_where_sharding_is(monkeypatch):
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    assert plain_name(1) == "one process"
    assert plain_name(2) == "DDP (FSDP, ZeRO: accelerate launch --config_file accelerate_configs/...)"
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    assert plain_name(2) == "DDP, whole model in each process"


def test_a_mesh_of_another_number_of_processes_is_refused(monkeypatch):
    """The launcher's own variables of accelerate_configs/fsdp_hybrid.yaml."""
    file = next(path for path in CONFIGS if path.stem == "fsdp_hybrid")
    args = launch_command_parser().parse_args(["--config_file", str(file), "--num_processes", "2", "run_clm.py"])
    args, _, _ = _validate_launch_command(args)
    for name, value in prepare_multi_gpu_env(args).items():
        if name.startswith("PARALLELISM_CONFIG"):
            monkeypatch.setenv(name, value)
    for processes in ("2", "8"):
        monkeypatch.setenv("WORLD_SIZE", processes)
        with pytest.raises(ValueError, match=f"mesh of 2 x 2 processes and {processes} run: change"):
            check_mesh()
    monkeypatch.setenv("WORLD_SIZE", "4")
    check_mesh()


@pytest.mark.parametrize("first", [True, False])
def test_an_engine_says_once_what_it_ignores(first, monkeypatch):
    monkeypatch.setenv("RANK", "0" if first else "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    options = CPUOffload(offload_params=True)
    plugin = SimpleNamespace(
        sharding_strategy=ShardingStrategy.FULL_SHARD, use_orig_params=True, cpu_offload=options,
        activation_checkpointing=False,
    )  # fmt: skip
    accelerator = SimpleNamespace(
        device=torch.device("cpu"),
        num_processes=2,
        mixed_precision="no",
        state=SimpleNamespace(fsdp_plugin=plugin),
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        FSDP1(accelerator, Arguments(output_dir="a", fsdp_prefetch=2))
    said = [str(warning.message).split(":")[0] for warning in caught]
    assert said == (["--fsdp_prefetch is ignored", "fsdp_offload_params is ignored"] if first else [])


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
    sizes = {type(m).__name__: sum(p.numel() for p in m.parameters()) for m in model.model.layers[0].modules()}
    chosen = classes_by_size(model, sizes["ContinuumLevel"] - 1)
    assert {"HopeBlock", "ContinuumMemory", "ContinuumLevel"} <= set(chosen)
    assert not {"ModuleList", "Linear", "InitialMemory", "HopeModel", "HopeForCausalLM"} & set(chosen)
    assert classes_by_size(model, sizes["HopeBlock"]) == []


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (
            '{"gradient_accumulation_steps": 4}',
            "has gradient_accumulation_steps 4 and --gradient_accumulation_steps is 1",
        ),
        ('{"gradient_clipping": 0.5}', "has gradient_clipping 0.5 and --max_grad_norm is 1"),
        ('{"train_micro_batch_size_per_gpu": 3}', "--per_device_train_batch_size is 8"),
        ('{"optimizer": {"type": "Adam"}}', "brings optimizer, and so does hope-hf train"),
    ],
)
def test_a_deepspeed_file_that_contradicts_a_flag_is_refused(tmp_path, monkeypatch, content, said):
    file = tmp_path / "ds.json"
    file.write_text(content)
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", str(file))
    with pytest.raises(ValueError, match=said):
        zero._check_file(Arguments(output_dir=str(tmp_path)))
