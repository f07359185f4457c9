"""`hope-hf plan`: table, JSON, picture, verdicts, and one sentence for each mistake."""

import json
from pathlib import Path

import pytest
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP

from hope_hf.common.gpus import GPUS
from hope_hf.plan import main
from hope_hf.plan.launch import STRATEGIES, Launch
from hope_hf.plan.parsing import parse
from hope_hf.plan.simulate import Simulation
from hope_hf.plan.traffic import traffic
from hope_hf.plan.verdict import settings, verdict

ROOT = Path(__file__).parents[2]
FSDP = ["--accelerate_config", f"{ROOT}/accelerate_configs/fsdp2.yaml"]
ONE_ROW = ["--per_device_train_batch_size", "1"]
# As wide and deep as the preset `mid`; a Llama is traced in less time.
OF_MID = "hidden_size=1024,intermediate_size=4096,num_hidden_layers=24,num_attention_heads=16,num_key_value_heads=16"
MID = ["--model_type", "llama", "--config_overrides", OF_MID, *FSDP, "--mixed_precision", "bf16"]
MID += ["--block_size", "2048"]
MID += ["--world_size", "8", *ONE_ROW]
LLAMA = ["--model_type", "llama", "--world_size", "8", "--mixed_precision", "bf16", *ONE_ROW]
TINY_LAYER = ["--config_overrides", "num_hidden_layers=1", "--block_size", "64", *ONE_ROW]


def planned(capsys, *words) -> dict:
    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def refused(capsys, *words) -> str:
    assert main([*words]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("warning: ")]
    assert len(lines) == 1 and lines[0].startswith("error: ")
    return lines[0]


def test_table_and_picture_name_every_setting_and_the_verdicts(capsys, tmp_path):
    picture = tmp_path / "plan.png"
    words = [*MID, "--world_size", "16", "--gpu", "h100-80gb,a100-40gb", "--plot", str(picture)]
    assert main([*words, "--total_tokens", "30e9", "--price_per_gpu_hour", "3"]) == 0
    text = capsys.readouterr().out
    for name in (*STRATEGIES, "full_shard (asked)"):
        assert f"| {name} " in text
    for gpu in ("h100-80gb", "a100-40gb"):
        (line,) = [line for line in text.splitlines() if line.startswith(f"{gpu}: ")]
        assert "fits" in line and "largest batch" in line and "days" in line and "cost" in line
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_json_and_simulation(capsys):
    words = [*TINY_LAYER, *FSDP, "--world_size", "4"]
    assert planned(capsys, *words)["simulation"] is None
    plan = planned(capsys, *words, "--simulate")
    asked, simulation = plan["settings"][0], plan["simulation"]
    assert asked["is_asked"] and asked["setting"] == "full_shard" and asked["peak"] == sum(asked["split"].values())
    assert plan["gpus"]["h100-80gb"]["peak"] == simulation["peak"] == sum(simulation["split"].values())
    assert asked["peak"] == pytest.approx(simulation["peak"], rel=0.005)


def test_flash_attention_is_traced_as_a_kernel_of_the_same_memory(capsys):
    words = ["--model_type", "llama", "--block_size", "64", *ONE_ROW]
    words += ["--config_overrides", "num_hidden_layers=1,hidden_size=64,intermediate_size=128"]
    flash, sdpa = (planned(capsys, *words, "--attn_implementation", kind) for kind in ("flash_attention_2", "sdpa"))
    assert flash["settings"][0]["peak"] == sdpa["settings"][0]["peak"]


def test_what_fake_tensors_cannot_do_is_estimated(capsys, monkeypatch):
    """A model that asks which of its numbers are not 0, as some choose their experts."""

    def of_chosen_tokens(mlp, x):
        chosen = x.sum(-1).nonzero()[:, 1].tolist()
        return mlp.down_proj(mlp.up_proj(x)) * len(chosen)

    monkeypatch.setattr(LlamaMLP, "forward", of_chosen_tokens)
    words = ["--model_type", "llama", *TINY_LAYER]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "activations of a llama are estimated" in out and "h100-80gb: " in out
    assert main([*words, "--simulate"]) == 0
    assert "No simulation: llama" in capsys.readouterr().out


def test_days_and_cost_follow_from_the_flops(capsys):
    words = [*MID, "--total_tokens", "30e9", "--mfu", "0.5", "--price_per_gpu_hour", "2"]
    plan = planned(capsys, *words)
    gpu = plan["gpus"]["h100-80gb"]
    seconds = 30e9 * plan["flops_per_token"] / (8 * GPUS["h100-80gb"].flops * 0.5)
    assert gpu["days"] == pytest.approx(seconds / 86_400)
    assert gpu["cost"] == pytest.approx(seconds / 3600 * 8 * 2)
    assert gpu["step_seconds"] == pytest.approx(seconds * plan["tokens_per_step"] / 30e9)
    # fp32 computes at half the rate
    fp32 = planned(capsys, *words, "--mixed_precision", "no")["gpus"]["h100-80gb"]
    assert fp32["step_seconds"] == pytest.approx(2 * gpu["step_seconds"])


def test_states_at_rest_are_those_of_the_literature(capsys):
    """Also where the peak has no gradients: 16 bytes a parameter, 4 + 4 + 8."""
    plan = planned(capsys, *LLAMA, *FSDP, "--block_size", "16")
    rows = {row["setting"]: row["states"] for row in plan["settings"]}
    each = plan["parameters"]
    for setting, shares in {"ddp": (1, 1, 1), "zero1": (1, 1, 8), "zero2": (1, 8, 8), "full_shard": (8, 8, 8)}.items():
        expected = {}
        for name, size, share in zip(("weights", "gradients", "optimizer"), (4, 4, 8), shares, strict=True):
            expected[name] = pytest.approx(size * each / share)
        assert {name: rows[setting][name] for name in expected} == expected
    assert rows["fsdp_offload"] == rows["full_shard"]


def test_what_does_not_fit_names_a_setting_that_does(capsys, tmp_path):
    LlamaConfig().save_pretrained(tmp_path)
    words = ["--config_name", str(tmp_path), "--world_size", "8", "--mixed_precision", "bf16"]
    words += [*ONE_ROW, "--block_size", "1024", "--gpu", "a100-40gb"]
    gpu = planned(capsys, *words)["gpus"]["a100-40gb"]
    assert not gpu["fits"] and "fsdp2.yaml" in gpu["instead"] and gpu["largest_batch"] == 0
    sharded = planned(capsys, *words, *FSDP)["gpus"]["a100-40gb"]
    assert sharded["fits"] and sharded["largest_batch"] >= 1
    # whole gradients between batches do not fit, reduced ones do
    accumulated = [*words, *FSDP, "--gradient_accumulation_steps", "4"]
    gpu = planned(capsys, *accumulated)["gpus"]["a100-40gb"]
    assert not gpu["fits"] and "--sync_each_batch" in gpu["instead"]
    assert planned(capsys, *accumulated, "--sync_each_batch")["gpus"]["a100-40gb"]["fits"]


def test_what_is_suggested_fits_by_the_simulation_too():
    """Where the plan fits and the simulation does not, the setting that was asked for is no advice."""
    words = ["--model_type", "gpt2", "--gpu", "rtx4090-24gb", "--block_size", "368"]
    question = parse([*words, "--per_device_train_batch_size", "33"])
    rows, gpu = settings(question), question.gpus[0]
    assert rows[0].memory.peak <= gpu.usable
    simulated = Simulation(gpu.usable + 1, {}, 0.0)
    assert verdict(question, rows, gpu, simulated).instead == "--gradient_checkpointing block"


def test_the_largest_batch_fits_and_one_row_more_does_not(capsys):
    largest = planned(capsys, *MID)["gpus"]["h100-80gb"]["largest_batch"]
    for rows, fits in ((largest, True), (largest + 1, False)):
        plan = planned(capsys, *MID, "--per_device_train_batch_size", str(rows))
        assert plan["gpus"]["h100-80gb"]["fits"] is fits


def test_traffic_is_that_of_the_arithmetic_in_the_dtype_of_the_flag(capsys):
    plan = planned(capsys, *MID)
    sent = traffic(plan["parameters"], Launch(STRATEGIES["full_shard"], 8, 8, "bf16"), gather_bytes=2)
    assert plan["settings"][0]["gather_bytes"] == pytest.approx(sent.gather)
    low = planned(capsys, *MID, "--fsdp_reduce_dtype", "bfloat16")["settings"][0]
    assert plan["settings"][0]["reduce_bytes"] == sent.reduce == 2 * low["reduce_bytes"]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--gpu", "h100"], "did you mean h100-80gb"),
        (["--world_size", "0"], "--world_size is 0"),
        (["--config_overrides", "num_hidden_layers=2", "--per_device_train_batch_size", "9999"], "or give --grad"),
        (["--accelerate_config", f"{ROOT}/accelerate_configs/deepspeed_zero3.yaml", "--optimizer", "muon"], "muon"),
        (["--config_name", "midd"], "did you mean mid"),
        (["--model_type", "lama"], "did you mean llama"),
        (["--model_name_or_path", "x", "--model_type", "llama"], "--model_type"),
        (["--model_type", "gpt2", "--block_size", "2048"], "--block_size 2048"),
        (["--config_overrides", "vocab_size=0"], "vocab_size is 0"),
        (["--plot", "plan.pdf"], "--plot"),
        (["--plot", "missing/plan.png"], "--plot"),
        (["--mfu", "1e-320"], "--mfu is"),
        (["--accelerate_confg", "x"], "did you mean --accelerate_config"),
    ],
)
def test_one_sentence_for_each_mistake(words, named, capsys):
    assert named in refused(capsys, *words)


def test_ignored_flags_are_named(capsys, recwarn):
    words = ["--price_per_gpu_hour", "3", "--sync_each_batch", "--fsdp_reduce_dtype", "bfloat16"]
    planned(capsys, *TINY_LAYER, *words)
    warned = " ".join(str(warning.message) for warning in recwarn)
    assert all(f"{flag} is ignored" in warned for flag in words if flag.startswith("--"))


def test_a_recipe_gives_the_plan_of_its_flags(capsys, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "output_dir: runs/x\nconfig_name: tiny\nblock_size: 256\nper_device_train_batch_size: 2\n"
        "learning_rate: 1e-3\ndataset_name: books\nmax_train_steps: 1000\nattn_implementation: flash_attention_2\n"
    )
    words = ["--world_size", "2", "--per_device_train_batch_size", "3"]
    of_recipe = planned(capsys, str(recipe), *words)
    flags = ["--config_name", "tiny", "--block_size", "256"]
    assert of_recipe == planned(capsys, *flags, "--max_train_steps", "1000", *words)
    assert of_recipe["tokens_per_step"] == 2 * 3 * 256
    tokens = str(1000 * 2 * 3 * 256)
    assert of_recipe["gpus"] == planned(capsys, *flags, "--total_tokens", tokens, *words)["gpus"]
