"""The alternative values in README and the launch files: each setting gives the curve of one process, too."""

import json

import pytest
import yaml
from engine_runs import NEEDS_DEEPSPEED, ROWS, SMALL, run_plan, same
from training_runs import HOPE, ROOT, curve

pytestmark = pytest.mark.long
STEPS = 6
FLAGS = [*HOPE, *SMALL, "--max_train_steps", str(STEPS), "--checkpointing_steps", "0"]

# Launch file, changes of its section, and flags of run_clm.py.
SETTINGS = {
    "fsdp2-gathered-once": ("fsdp2", {"fsdp_reshard_after_forward": False}, []),
    "fsdp2-by-size": ("fsdp2", {"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_min_num_params": 20_000}, []),
    "fsdp2-recomputing": ("fsdp2", {"fsdp_activation_checkpointing": True}, []),
    "fsdp2-recomputing-by-flag": (
        "fsdp2", {"fsdp_activation_checkpointing": True}, ["--gradient_checkpointing", "every:2"]
    ),
    "fsdp2-prefetching": ("fsdp2", {}, ["--fsdp_prefetch", "2"]),
    "fsdp2-compiled": ("fsdp2", {}, ["--torch_compile", "true"]),
    "fsdp1-grad-op": ("fsdp1", {"fsdp_sharding_strategy": "SHARD_GRAD_OP"}, []),
    "fsdp1-hybrid": ("fsdp1", {"fsdp_sharding_strategy": "HYBRID_SHARD"}, []),
    "fsdp1-no-shard": ("fsdp1", {"fsdp_sharding_strategy": "NO_SHARD"}, []),
    "fsdp1-prefetching": ("fsdp1", {"fsdp_backward_prefetch": "BACKWARD_POST", "fsdp_forward_prefetch": True}, []),
    "fsdp1-no-prefetch": ("fsdp1", {"fsdp_backward_prefetch": "NO_PREFETCH"}, ["--fsdp_limit_all_gathers", "false"]),
    "fsdp1-by-size": ("fsdp1", {"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_min_num_params": 20_000}, []),
    "fsdp1-recomputing": ("fsdp1", {"fsdp_activation_checkpointing": True}, []),
    "fsdp1-recomputing-by-flag": ("fsdp1", {}, ["--gradient_checkpointing", "mixer"]),
    "fsdp1-offloaded": ("fsdp1", {"fsdp_offload_params": True}, []),
}
# Compute in bfloat16, so only near the curve; reducing in bfloat16 too is further off.
BF16 = {
    "fsdp2": ("fsdp2", {}, []),
    "fsdp2-reduced-in-bf16": ("fsdp2", {}, ["--fsdp_reduce_dtype", "bfloat16"]),
    "fsdp1": ("fsdp1", {}, []),
    "zero3": ("deepspeed_zero3", {}, []),
}


@pytest.fixture(scope="module")
def single(corpus, tmp_path_factory):
    """The rows of one process."""
    runs = {"hope": {"flags": [*FLAGS, *corpus, "--per_device_train_batch_size", str(ROWS)]}}
    return run_plan("single", 1, runs, tmp_path_factory.mktemp("single"))["hope"]


@pytest.fixture
def launched(corpus, tmp_path):
    """The rows of two processes under a launch file with other values, at its top or in its section for FSDP."""

    def launch(name: str, section: dict, flags: list[str], **changes) -> list[dict]:
        values = yaml.safe_load((ROOT / "accelerate_configs" / f"{name}.yaml").read_text())
        assert changes.keys() <= values.keys()
        values = {key: value for key, value in (values | changes).items() if value is not None}
        if section:
            assert section.keys() - {"fsdp_min_num_params"} <= values["fsdp_config"].keys()
            values["fsdp_config"] |= section
        file = tmp_path / "changed.yaml"
        file.write_text(yaml.safe_dump(values))
        runs = {"hope": {"flags": [*FLAGS, *corpus, *flags, "--per_device_train_batch_size", str(ROWS // 2)]}}
        # An absolute path replaces the folder of launch files.
        return run_plan(str(file.with_suffix("")), 2, runs, tmp_path)["hope"]

    return launch


@pytest.mark.parametrize("name", SETTINGS)
def test_setting_gives_the_curve_of_one_process(launched, single, name):
    assert len(curve(single)) == STEPS
    same(launched(*SETTINGS[name]), single, rel=1e-5)


@NEEDS_DEEPSPEED
@pytest.mark.parametrize("stage", [2, 3])
def test_deepspeed_json_of_ones_own_gives_the_curve_of_one_process(launched, single, tmp_path, stage):
    own = {"zero_optimization": {"stage": stage, "reduce_bucket_size": 50_000}, "gradient_clipping": "auto"}
    own |= {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}
    file = tmp_path / "own.json"
    file.write_text(json.dumps(own))
    named = {"deepspeed_config_file": str(file), "zero3_init_flag": False}
    same(launched(f"deepspeed_zero{stage}", {}, [], deepspeed_config=named, mixed_precision=None), single, rel=1e-5)


@pytest.mark.parametrize("name", [pytest.param(n, marks=NEEDS_DEEPSPEED) if n == "zero3" else n for n in BF16])
def test_bf16_follows_the_curve(launched, single, name):
    own = launched(*BF16[name], mixed_precision="bf16")
    assert curve(own) == pytest.approx(curve(single), rel=2e-2)
    assert curve(own) != pytest.approx(curve(single), rel=1e-6)
    # The loss itself is float32: in bfloat16 the sum over a process's tokens would be a whole number.
    # Of a row's 32 tokens all but the first are predicted.
    sums = [loss * ROWS * 31 for loss in curve(own)]
    assert max(abs(total - round(total)) for total in sums) > 0.02
