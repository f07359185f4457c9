"""`hope-hf plan`: table, JSON, picture, verdicts, and one sentence for each mistake."""

import json
import time
from pathlib import Path

import pytest
from transformers import LlamaConfig

from hope_hf import HopeConfig
from hope_hf.common.gpus import GPUS
from hope_hf.plan import main
from hope_hf.plan.launch import STRATEGIES, Launch
from hope_hf.plan.parsing import parse
from hope_hf.plan.shapes import shapes_of
from hope_hf.plan.simulate import Simulation
from hope_hf.plan.traffic import traffic
from hope_hf.plan.verdict import settings, verdict

ROOT = Path(__file__).parents[2]
FSDP = ["--accelerate_config", f"{ROOT}/accelerate_configs/fsdp2.yaml"]
MID = ["--config_name", "mid", *FSDP, "--mixed_precision", "bf16", "--block_size", "2048", "--no_simulate"]


def planned(capsys, *words) -> dict:
    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def refused(capsys, *words) -> str:
    assert main([*words]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("warning: ")]
    assert len(lines) == 1 and lines[0].startswith("error: ") and lines[0][-1] in ".?"
    return lines[0]


def test_table_names_every_setting_and_the_verdicts(capsys):
    words = [*MID, "--world_size", "16", "--per_device_train_batch_size", "1", "--gpu", "h100-80gb,a100-40gb"]
    assert main([*words, "--total_tokens", "30e9", "--price_per_gpu_hour", "3"]) == 0
    text = capsys.readouterr().out
    named = {line.split()[1] for line in text.splitlines() if line.startswith("| ")}
    assert set(STRATEGIES) <= named and "full_shard (asked)" in text and "759,486,720 parameters" in text
    for gpu in ("h100-80gb", "a100-40gb"):
        (line,) = [line for line in text.splitlines() if line.startswith(f"{gpu}: ")]
        assert "fits" in line and "largest batch" in line and "days" in line and "cost" in line


def test_json_and_simulation(capsys):
    small = ["--config_overrides", "num_hidden_layers=1", "--block_size", "64", "--per_device_train_batch_size", "1"]
    plan = planned(capsys, *small, *FSDP, "--world_size", "4")
    assert plan["simulation"]["peak"] == sum(plan["simulation"]["split"].values())
    (asked,) = [row for row in plan["settings"] if row["is_asked"]]
    assert asked["setting"] == "full_shard" and asked["peak"] == sum(asked["split"].values())
    assert plan["gpus"]["h100-80gb"]["fits"] and plan["gpus"]["h100-80gb"]["peak"] == plan["simulation"]["peak"]
    shapes = shapes_of(HopeConfig.from_preset("tiny", num_hidden_layers=1))
    assert plan["parameters"] == shapes.count


@pytest.mark.parametrize("words", [["--gradient_checkpointing"], ["--gradient_checkpointing", "true"], []])
def test_recomputation_is_advised_where_it_is_not_set(words, capsys):
    asked = ["--config_name", "mid", "--block_size", "8192", "--per_device_train_batch_size", "999", *words]
    assert ("give --gradient_checkpointing" in refused(capsys, *asked, "--no_simulate")) is (not words)


def test_days_and_cost_follow_from_the_flops(capsys):
    words = [*MID, "--world_size", "8", "--per_device_train_batch_size", "1", "--total_tokens", "30e9", "--mfu", "0.5"]
    plan = planned(capsys, *words, "--price_per_gpu_hour", "2")
    gpu = plan["gpus"]["h100-80gb"]
    seconds = 30e9 * plan["flops_per_token"] / (8 * GPUS["h100-80gb"].flops * 0.5)
    assert gpu["days"] == pytest.approx(seconds / 86_400)
    assert gpu["cost"] == pytest.approx(seconds / 3600 * 8 * 2)
    assert gpu["step_seconds"] == pytest.approx(seconds * plan["tokens_per_step"] / 30e9)


def test_fp32_computes_at_half_the_rate_of_bf16(capsys):
    words = [*MID, "--world_size", "8", "--per_device_train_batch_size", "1"]
    half, full = (planned(capsys, *words, "--mixed_precision", precision) for precision in ("no", "bf16"))
    seconds = [plan["gpus"]["h100-80gb"]["step_seconds"] for plan in (half, full)]
    assert seconds[0] == pytest.approx(2 * seconds[1])
    assert main([*words, "--mixed_precision", "no"]) == 0 and "at 40% of the TF32 peak" in capsys.readouterr().out


def test_states_at_rest_are_those_of_the_literature(capsys):
    """Also where the peak has no gradients: 16 bytes a parameter, 4 + 4 + 8."""
    words = ["--model_type", "llama", "--no_simulate", "--world_size", "8", "--mixed_precision", "bf16", *FSDP]
    words += ["--block_size", "16", "--per_device_train_batch_size", "1"]
    plan = planned(capsys, *words)
    rows = {row["setting"]: row["states"] for row in plan["settings"]}
    each = plan["parameters"] / 1e9
    for setting, shares in {"ddp": (1, 1, 1), "zero1": (1, 1, 8), "zero2": (1, 8, 8), "full_shard": (8, 8, 8)}.items():
        found = [rows[setting][name] / 1e9 for name in ("weights", "gradients", "optimizer")]
        assert found == pytest.approx([size * each / share for size, share in zip((4, 4, 8), shares, strict=True)])
    assert rows["fsdp_offload"] == rows["full_shard"]
    assert main(words) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| zero1 ")][1:]
    assert [cell.strip() for cell in line.split("|")][2:5] == [f"{4 * each:.3f}", f"{4 * each:.3f}", f"{each:.3f}"]


def test_what_does_not_fit_names_a_setting_that_does(capsys, tmp_path):
    folder = tmp_path / "llama"
    LlamaConfig().save_pretrained(folder)
    words = ["--config_name", str(folder), "--world_size", "8", "--mixed_precision", "bf16", "--no_simulate"]
    words += ["--per_device_train_batch_size", "1", "--block_size", "1024"]
    gpu = planned(capsys, *words, "--gpu", "a100-40gb")["gpus"]["a100-40gb"]
    assert not gpu["fits"] and "fsdp2.yaml" in gpu["instead"]
    assert gpu["largest_batch"] == 0
    # The setting that it names fits.
    sharded = planned(capsys, *words, "--gpu", "a100-40gb", *FSDP)["gpus"]["a100-40gb"]
    assert sharded["fits"] and sharded["largest_batch"] >= 1


def test_what_is_suggested_fits_by_the_simulation_too(monkeypatch):
    """Where arithmetic fits and the simulation does not, the setting that was asked for is no advice."""
    words = ["--model_type", "gpt2", "--gpu", "rtx4090-24gb", "--block_size", "368"]
    question = parse([*words, "--per_device_train_batch_size", "34"])
    rows, gpu = settings(question), question.gpus[0]
    simulated = Simulation(gpu.usable + 1, {}, 0.0)
    assert rows[0].memory.peak <= gpu.usable
    assert verdict(question, rows, gpu, simulated).instead == "--gradient_checkpointing block"


def test_reduced_gradients_are_suggested_where_whole_ones_do_not_fit(capsys):
    words = ["--model_type", "llama", *FSDP, "--world_size", "8", "--mixed_precision", "bf16", "--no_simulate"]
    words += ["--per_device_train_batch_size", "1", "--block_size", "1024", "--gradient_accumulation_steps", "4"]
    found = planned(capsys, *words, "--gpu", "a100-40gb")
    gpu = found["gpus"]["a100-40gb"]
    assert not gpu["fits"] and found["settings"][0]["between_batches"] and "--sync_each_batch" in gpu["instead"]
    reduced = planned(capsys, *words, "--gpu", "a100-40gb", "--sync_each_batch")
    assert reduced["gpus"]["a100-40gb"]["fits"] and not reduced["settings"][0]["between_batches"]


def test_the_largest_batch_fits_and_one_row_more_does_not(capsys):
    words = [*MID, "--world_size", "8"]
    gpu = planned(capsys, *words, "--per_device_train_batch_size", "1")["gpus"]["h100-80gb"]
    for rows, fits in ((gpu["largest_batch"], True), (gpu["largest_batch"] + 1, False)):
        found = planned(capsys, *words, "--per_device_train_batch_size", str(rows))["gpus"]["h100-80gb"]
        assert found["fits"] is fits


def test_reduced_gradients_have_the_dtype_of_the_flag(capsys):
    words = [*MID, "--world_size", "8", "--per_device_train_batch_size", "1"]
    sent = [planned(capsys, *words, "--fsdp_reduce_dtype", dtype)["settings"][0] for dtype in ("float32", "bfloat16")]
    assert sent[0]["reduce_bytes"] == 2 * sent[1]["reduce_bytes"]
    assert sent[0]["gather_bytes"] == sent[1]["gather_bytes"]


def test_picture(capsys, tmp_path):
    file = tmp_path / "plan.png"
    assert main([*MID, "--world_size", "8", "--per_device_train_batch_size", "1", "--plot", str(file)]) == 0
    assert file.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("world", [1, 2, 1024])
def test_arithmetic_takes_seconds_for_any_world(world, capsys):
    words = MID if world > 1 else [word for word in MID if word not in FSDP]
    start = time.perf_counter()
    plan = planned(capsys, *words, "--world_size", str(world), "--per_device_train_batch_size", "1")
    assert time.perf_counter() - start < 5
    assert plan["world_size"] == world
    assert len(plan["settings"]) == (1 if world == 1 else 9 if world == 1024 else 8)


def test_activations_of_other_architectures_are_estimated(capsys):
    overrides = "num_hidden_layers=2,hidden_size=64,intermediate_size=128,num_attention_heads=2,num_key_value_heads=2"
    assert main(["--model_type", "qwen2", "--config_overrides", overrides, "--no_simulate"]) == 0
    assert "activations of a qwen2 are estimated" in capsys.readouterr().out


def test_what_fake_tensors_cannot_do_leaves_the_arithmetic(capsys):
    """The experts of this one are chosen by numbers."""
    sizes = "num_hidden_layers=1,hidden_size=32,intermediate_size=32,num_attention_heads=2,num_key_value_heads=2"
    assert main(["--model_type", "mixtral", "--config_overrides", sizes, "--block_size", "16"]) == 0
    out = capsys.readouterr().out
    assert "No simulation: mixtral does not run on fake tensors (" in out and "h100-80gb: " in out


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--gpu", "h100"], "did you mean h100-80gb"),
        (["--gpu", ","], "--gpu"),
        (["--world_size", "0"], "--world_size is 0"),
        (["--config_name", "mid", "--block_size", "8192", "--per_device_train_batch_size", "99"], "fits no setting"),
        (["--accelerate_config", f"{ROOT}/accelerate_configs/single.yaml", "--world_size", "2"], "--world_size"),
        (["--accelerate_config", f"{ROOT}/accelerate_configs/deepspeed_zero3.yaml", "--optimizer", "muon"], "muon"),
        (["--config_name", "midd"], "did you mean mid"),
        (["--model_type", "lama"], "did you mean llama"),
        (["--model_name_or_path", "x", "--model_type", "llama"], "give only one"),
        (["--model_type", "gpt2", "--block_size", "2048"], "--block_size 2048"),
        (["--config_overrides", "vocab_size=0"], "vocab_size is 0"),
        (["--plot", "plan.pdf"], "--plot"),
        (["--mfu", "1e-320"], "--mfu is"),
        (["--network_gbit", "1e-320"], "--network_gbit is"),
        (["--total_tokens", "1e-320"], "--total_tokens is"),
        (["--plot", "missing/plan.png"], "--plot"),
        (["--accelerate_confg", "x"], "did you mean --accelerate_config"),
    ],
)
def test_one_sentence_for_each_mistake(words, named, capsys):
    assert named in refused(capsys, *words)


def test_ignored_flags_are_named(capsys, recwarn):
    words = ["--no_simulate", "--price_per_gpu_hour", "3", "--sync_each_batch", "--fsdp_reduce_dtype", "bfloat16"]
    planned(capsys, *words)
    assert {str(warning.message).split()[0] for warning in recwarn if "is ignored" in str(warning.message)} == {
        "--price_per_gpu_hour", "--sync_each_batch", "--fsdp_reduce_dtype"
    }  # fmt: skip


def test_traffic_of_the_table_is_that_of_the_arithmetic(capsys):
    plan = planned(capsys, *MID, "--world_size", "8", "--per_device_train_batch_size", "1")
    sent = traffic(plan["parameters"], Launch(STRATEGIES["full_shard"], 8, 8, "bf16"), gather_bytes=2)
    assert plan["settings"][0]["gather_bytes"] == pytest.approx(sent.gather)


def test_a_recipe_gives_the_plan_of_its_flags(capsys, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "output_dir: runs/x\nconfig_name: pilot\nblock_size: 2048\nper_device_train_batch_size: 2\n"
        "learning_rate: 1e-3\ndataset_name: books\nmax_train_steps: 1000\nattn_implementation: flash_attention_2\n"
    )
    words = ["--world_size", "2", "--no_simulate"]
    of_recipe = planned(capsys, str(recipe), *words, "--per_device_train_batch_size", "3")
    given = ["--config_name", "pilot", "--block_size", "2048", "--per_device_train_batch_size", "3"]
    assert of_recipe == planned(capsys, *given, "--max_train_steps", "1000", *words)
    tokens = 1000 * of_recipe["tokens_per_step"]
    assert of_recipe["tokens_per_step"] == 2 * 3 * 2048
    days = of_recipe["gpus"]["h100-80gb"]["days"]
    assert days == planned(capsys, *given, "--total_tokens", str(tokens), *words)["gpus"]["h100-80gb"]["days"]


def test_a_model_on_the_command_line_replaces_weights_that_are_not_there_yet(capsys, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"model_name_or_path: {tmp_path}/first\nblock_size: 64\n")
    assert f"--model_name_or_path {tmp_path}/first" in refused(capsys, str(recipe), "--no_simulate")
    assert planned(capsys, str(recipe), "--no_simulate", "--config_name", "pilot")["parameters"] > 100e6


def test_another_model_replaces_that_of_the_recipe(capsys, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("config_name: tiny\nconfig_overrides: head_dim=32\nblock_size: 64\n")
    words = ["--no_simulate", "--model_type", "gpt2", "--block_size", "64"]
    assert planned(capsys, str(recipe), *words) == planned(capsys, *words)


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("learnin_rate: 1", "unknown key 'learnin_rate'; did you mean learning_rate?"),
        ("bf16: true", "There is no flag --bf16: set mixed_precision: bf16 in the launch file"),
        ("world_size: 2", "unknown key 'world_size'"),
        ("block_size: many", "--block_size"),
    ],
)
def test_one_sentence_for_a_wrong_recipe(line, named, capsys, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"{line}\n")
    assert named in refused(capsys, str(recipe))


def test_flash_attention_is_simulated_by_a_kernel_of_the_same_memory(capsys):
    small = ["--model_type", "llama", "--config_overrides", "num_hidden_layers=1,hidden_size=64,intermediate_size=128"]
    small += ["--block_size", "64", "--per_device_train_batch_size", "1"]
    flash = planned(capsys, *small, "--attn_implementation", "flash_attention_2")["simulation"]
    assert flash["peak"] == planned(capsys, *small, "--attn_implementation", "sdpa")["simulation"]["peak"]
