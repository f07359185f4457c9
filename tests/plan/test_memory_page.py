"""Every figure of docs/memory.md, computed by the planner."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import GPT2Config, LlamaConfig

from hope_hf import PRESETS, HopeConfig
from hope_hf.plan.activations import activations
from hope_hf.plan.communication import traffic
from hope_hf.plan.memory import memory
from hope_hf.plan.shapes import shapes_of
from hope_hf.plan.states import ADAM_MOMENTS, Bytes, largest_model, state_bytes
from hope_hf.plan.step import StepOptions
from hope_hf.plan.strategy import STRATEGIES, Launch
from hope_hf.step.recompute import Recomputed

PAGE = Path(__file__).parents[2] / "docs/memory.md"
SEVEN_B, GB = 7e9, 1e9
FULL = Launch(STRATEGIES["full_shard"], 8, 8, "bf16")
LLAMA_70B = dict(
    hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8
)
MODELS = {
    # hybrids have the parameters of those without attention
    **{name: HopeConfig.from_preset(name) for name in PRESETS if not name.endswith("-hybrid")},
    "GPT-2 124M": GPT2Config(),
    "Llama-7B": LlamaConfig(),
    "Llama-70B": LlamaConfig(**LLAMA_70B),
}
PURE = Bytes(weights=2, gradients=2)


def states(key: str, each: Bytes = Bytes()) -> float:  # noqa: B008
    """GB of 7 B parameters on each of 8 processes."""
    return state_bytes(SEVEN_B, STRATEGIES[key], 8, each) / GB


def state_rows() -> list[str]:
    rows = (("fp32 weights and gradients (ours)", Bytes()), ("bf16 weights and gradients", PURE))
    keys = ("ddp", "zero1", "zero2", "full_shard")
    return [f"| {name} | {' | '.join(f'{states(key, each):.1f}' for key in keys)} |" for name, each in rows]


def model_rows() -> list[str]:
    rows = []
    for name, config in MODELS.items():
        shapes = shapes_of(config)
        tokens = min(2048, config.max_position_embeddings)
        kept = activations(config, shapes, FULL, 1, tokens, Recomputed("none"))
        recomputed = activations(config, shapes, FULL, 1, tokens, Recomputed("block"))
        sizes = (
            state_bytes(shapes.count, STRATEGIES["ddp"], 8),
            state_bytes(shapes.count, STRATEGIES["full_shard"], 8),
            2 * shapes.largest_block,
            kept.blocks,
            recomputed.blocks + recomputed.one_block,
            kept.loss,
            traffic(shapes.count, FULL, gather_bytes=2).total,
        )
        rows.append(f"| {name} | {shapes.count / 1e6:,.1f} | {' | '.join(f'{size / GB:,.3f}' for size in sizes)} |")
    return rows


def sentences() -> list[str]:
    """Every other passage of the page with a figure."""
    seven, gpt2 = traffic(SEVEN_B, FULL, gather_bytes=2, reduce_bytes=2), shapes_of(GPT2Config()).count
    ours = traffic(SEVEN_B, FULL, gather_bytes=2, reduce_bytes=4)
    llama = shapes_of(MODELS["Llama-7B"])
    kept = activations(MODELS["Llama-7B"], llama, FULL, 1, 4096, Recomputed("none"))
    step = StepOptions(1, 2048, accumulation=4)
    held = memory(MODELS["Llama-7B"], llama, FULL, step)
    reduced = memory(MODELS["Llama-7B"], llama, FULL, replace(step, sync_each_batch=True))
    hidden = (shapes_of(HopeConfig.from_preset("mid")).count, 1_947e6, 6_394e6)
    sixteen = [state_bytes(count, STRATEGIES["ddp"], 1) / GB for count in hidden]
    ddp, full = (largest_model(80 * GB, STRATEGIES[key], 8) / GB for key in ("ddp", "full_shard"))
    offloaded = 8 * state_bytes(SEVEN_B, STRATEGIES["fsdp_offload"], 8) / GB
    beside = states("full_shard") + 4 * SEVEN_B / GB
    return [
        f"{Bytes().total} bytes a parameter",
        f"{seven.total / GB:.2f} GB a step",
        f"{1e3 * seven.seconds(600e9):.0f} ms at 600 GB/s, {seven.seconds(25e9):.2f} s over one 25 GB/s link",
        f"{ours.total / GB:.1f} GB, since gradients are summed in fp32",
        f"**63 GB for SHARD_GRAD_OP.** That is ZeRO-1's ({states('zero1'):.1f}). Counted as ZeRO-2 it is "
        f"{states('zero2'):.1f}; FSDP keeps its shard of the weights beside the whole ones, in fp32 {beside:.1f} GB",
        f"holds {states('full_shard'):.1f} GB for 7 B on 8 processes, not {states('full_shard', PURE):.1f}",
        f"a block of Llama-7B keeps {kept.blocks / 32 / GB:.3f} GB for 4,096 tokens; 32 heads x 4,096^2 in bf16 alone "
        f"would be {32 * 4096**2 * 2 / GB:.2f}",
        f"{2 * llama.largest_block / GB:.3f} GB of Llama-7B in bf16, not all {2 * llama.count / GB:.2f}",
        f"for 7 B {offloaded:.0f} GB of the machine's memory, not {4 * SEVEN_B / GB:.0f}",
        "200 Gbit/s are 25 GB/s",
        f"{ADAM_MOMENTS * gpt2 / GB:.1f} GB of fp32 moments, not 2",
        f"{ddp:.0f} B parameters under DDP and {full:.0f} B under FSDP, not 20 and 160",
        f"really had 1,947 M and 6,394 M parameters: {sixteen[1]:.1f} and {sixteen[2]:.1f} GB, where 760 M have "
        f"{sixteen[0]:.1f}",
        f"Llama-7B {held.between_batches / GB:.1f} GB on every process",
        f"reduced after each, and it is {reduced.split['gradients'] / GB:.1f} GB",
    ]


@pytest.fixture(scope="module")
def page() -> str:
    return PAGE.read_text(encoding="utf-8")


def test_the_tables_are_the_planners(page):
    for row in [*state_rows(), *model_rows()]:
        assert row in page, row


def test_the_sentences_are_the_planners(page):
    text = " ".join(page.split())
    for sentence in sentences():
        assert sentence in text, sentence


def test_no_figure_is_left_over(page):
    """Without what the planner computed, the prose has no sizes, times or counts of parameters."""
    text = page
    for row in [*state_rows(), *model_rows()]:
        text = text.replace(row, "")
    text = " ".join(re.sub(r"```.*?```", "", text, flags=re.DOTALL).split())
    for sentence in sentences():
        text = text.replace(sentence, "")
    # The errors themselves, and what the figures are of.
    for given in (r"\*\*.*?\*\*", r"GB are 10\^9 bytes", "7 B parameters on 8 processes"):
        text = re.sub(given, "", text)
    assert re.findall(r"\d[\d,.]*\s?(?:GB|GiB|MiB|ms|s\b|B\b|M\b|bytes)", text) == []
