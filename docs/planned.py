"""Write the planner's figures into docs/distributed.md: `python docs/planned.py`.

A block of a page between `<!-- planned: NAME -->` and `<!-- end -->` is what the function NAME returns. A test
compares the page with it.
"""

import re
import textwrap
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import yaml
from transformers import GPT2Config, LlamaConfig, PreTrainedConfig

from hope_hf import PRESETS, HopeConfig
from hope_hf.common.gpus import GIB
from hope_hf.plan.launch import GRADIENTS, OPTIMIZER, STRATEGIES, WEIGHTS, Launch, StepOptions
from hope_hf.plan.memory import Memory, memory
from hope_hf.plan.parsing import Question, parse
from hope_hf.plan.parts import parts_of
from hope_hf.plan.shapes import shapes_of
from hope_hf.plan.traffic import traffic
from hope_hf.plan.verdict import settings, verdict

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"(<!-- planned: (\w+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
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
# Bytes per parameter under Adam. Ours are fp32 under every mixed precision.
FP32 = {WEIGHTS: 4, GRADIENTS: 4, OPTIMIZER: 8}
PURE_BF16 = FP32 | {WEIGHTS: 2, GRADIENTS: 2}

# Assumed, per hour.
PRICES = {
    "rtx4090-24gb": 0.5, "a6000-48gb": 0.8, "l40s-48gb": 1, "a100-40gb": 1.5, "a100-80gb": 2, "h100-80gb": 3,
    "h200-141gb": 4, "b200-180gb": 6,
}  # fmt: skip
SMALL = "rtx4090-24gb", "a100-40gb", "h100-80gb"
GPUS = {
    "demo": SMALL,
    "gpt2_4_layers_shakespeare": SMALL,
    "gpt2_124m_shakespeare": SMALL,
    "pilot": ("rtx4090-24gb", "l40s-48gb", "h100-80gb"),
    "mid": ("a6000-48gb", "l40s-48gb", "a100-80gb"),
    "mid_4096": ("l40s-48gb", "a100-80gb", "h100-80gb"),
    "target": ("a6000-48gb", "l40s-48gb", "a100-80gb"),
    "target_8192": ("h100-80gb", "h200-141gb", "b200-180gb"),
    "llama_7b": ("a100-40gb", "a100-80gb", "h100-80gb"),
}
RECOMPUTED = [name for name in GPUS if name.startswith(("pilot", "mid", "target"))]


def table(heads: list[str], rows: list[list[str]]) -> str:
    lines = [heads, *rows]
    written = [f"| {' | '.join(cells)} |\n".replace("|  |", "| |") for cells in lines]
    return "".join([written[0], "|---" * len(heads) + "|\n", *written[1:]])


def points(text: str) -> str:
    """A list of the paragraphs of a text, wrapped anew."""
    paragraphs = [" ".join(paragraph.split()) for paragraph in text.strip().split("\n\n")]
    wrapped = (textwrap.fill(paragraph, 119, initial_indent="- ", subsequent_indent="  ") for paragraph in paragraphs)
    return "".join(f"{lines}\n" for lines in wrapped)


def state_bytes(parameters: float, strategy: str, parts: int, each: dict[str, int] = FP32) -> float:
    """Bytes of weights, gradients and optimizer of one process, if a model is cut evenly into `parts` parts.

    Rajbhandari et al. 2020 (arXiv 1910.02054).
    """
    shared = STRATEGIES[strategy].shared
    return parameters * sum(size / (parts if kind in shared else 1) for kind, size in each.items())


def states_gb(strategy: str, each: dict[str, int] = FP32) -> float:
    """GB of 7 B parameters on each of 8 processes."""
    return state_bytes(SEVEN_B, strategy, 8, each) / GB


# ----- memory


def states() -> str:
    rows = {"fp32 weights and gradients (ours)": FP32, "bf16 weights and gradients": PURE_BF16}
    keys = {"DDP": "ddp", "ZeRO-1": "zero1", "ZeRO-2": "zero2", "ZeRO-3, FSDP": "full_shard"}
    figures = [[name, *(f"{states_gb(key, each):.1f}" for key in keys.values())] for name, each in rows.items()]
    return table(["", *keys], figures)


def models() -> str:
    heads = ["model", "parameters, millions", "states, DDP", "states, FSDP on 8", "largest gathered block"]
    heads += ["blocks kept", "recomputed", "loss", "sent per step, 8 processes"]
    rows = []
    for name, config in MODELS.items():
        shapes = shapes_of(config)
        tokens = min(2048, config.max_position_embeddings)
        kept = parts_of(config, shapes, FULL, StepOptions(1, tokens))
        recomputed = parts_of(config, shapes, FULL, StepOptions(1, tokens, checkpointing="block"))
        sizes = (
            state_bytes(shapes.count, "ddp", 8),
            state_bytes(shapes.count, "full_shard", 8),
            2 * shapes.largest_block,
            kept.kept,
            recomputed.kept + max(recomputed.blocks[0].backward),
            max(kept.ends.forward, *kept.ends.loss),
            traffic(shapes.count, FULL, gather_bytes=2).total,
        )
        rows.append([name, f"{shapes.count / 1e6:,.1f}", *(f"{size / GB:,.3f}" for size in sizes)])
    return table(heads, rows)


def accumulated() -> str:
    config: PreTrainedConfig = MODELS["Llama-7B"]
    step = StepOptions(1, 2048, accumulation=4)
    held = memory(config, shapes_of(config), FULL, step).between_batches
    reduced = memory(config, shapes_of(config), FULL, replace(step, sync_each_batch=True)).split["gradients"]
    return points(f"""
        **Accumulated batches:** FSDP adds up the gradients of the whole model until the last batch: for Llama-7B
        {held / GB:.1f} GB on every process. With `--sync_each_batch` gradients are reduced after each batch:
        {reduced / GB:.1f} GB. The gradients are then sent once per batch instead of once per step. The curve is the
        same to 1e-5 (`pytest tests/training/engines/test_engines.py -k reduced`). The card of a run has both figures,
        and `ram_rank<N>.jsonl` what was held ([reference.md](reference.md)).
    """)


def sent() -> str:
    seven = traffic(SEVEN_B, FULL, gather_bytes=2, reduce_bytes=2)
    ours = traffic(SEVEN_B, FULL, gather_bytes=2, reduce_bytes=4)
    return points(f"""
        In bf16, 7 B parameters on 8 processes send 3 x parameters x 2 x 7/8 = {seven.total / GB:.2f} GB per step:
        {1e3 * seven.seconds(600e9):.0f} ms at 600 GB/s, {seven.seconds(25e9):.2f} s over one 25 GB/s link of
        InfiniBand.

        By default `hope-hf train` sends {ours.total / GB:.1f} GB, since gradients are summed in fp32
        (`--fsdp_reduce_dtype`).
    """)


def mistakes() -> str:
    llama, gpt2 = shapes_of(MODELS["Llama-7B"]), shapes_of(GPT2Config())
    kept = parts_of(MODELS["Llama-7B"], llama, FULL, StepOptions(1, 4096)).kept / 32
    mid, larger, largest = (16 * count / GB for count in (shapes_of(MODELS["mid"]).count, 1_947e6, 6_394e6))
    ddp, full = (80 / state_bytes(1, key, 8) for key in ("ddp", "full_shard"))
    beside = states_gb("full_shard") + 4 * SEVEN_B / GB
    return points(f"""
        **63 GB for SHARD_GRAD_OP.** ZeRO-1 needs {states_gb("zero1"):.1f} GB. Counted as ZeRO-2 the figure is
        {states_gb("zero2"):.1f}. FSDP keeps its shard of the weights beside the whole ones, in fp32 {beside:.1f} GB
        while they are gathered.

        **bf16 halves weights and gradients.** The dtype that computes is not the one that is stored: `hope-hf train`
        holds {states_gb("full_shard"):.1f} GB for 7 B on 8 processes, not {states_gb("full_shard", PURE_BF16):.1f}.

        **Activations grow with heads x tokens^2.** Not with sdpa or flash attention: a block of Llama-7B keeps
        {kept / GB:.3f} GB for 4,096 tokens; 32 heads x 4,096^2 in bf16 alone would be {32 * 4096**2 * 2 / GB:.2f}.

        **FSDP gathers the whole model.** It gathers one block at a time: {2 * llama.largest_block / GB:.3f} GB of
        Llama-7B in bf16, not all {2 * llama.count / GB:.2f}.

        **Offloading needs room for the weights.** Gradients and optimizer are offloaded too: for 7 B
        {8 * states_gb("fsdp_offload"):.0f} GB of the machine's memory, not {4 * SEVEN_B / GB:.0f}.

        **A 200 Gbit/s link counted as 200 GB/s.** 200 Gbit/s are 25 GB/s.

        **GPT-2's Adam state.** It is {FP32[OPTIMIZER] * gpt2.count / GB:.1f} GB of fp32 moments, not 2.

        **The largest model of eight GPUs of 80 GB.** At {sum(FP32.values())} bytes per parameter they hold {ddp:.0f} B
        parameters under DDP and {full:.0f} B under FSDP, not 20 and 160, and nothing else.

        **Accumulated gradients are stale.** All batches of a step see the same weights; the sum is exact.

        **A HOPE of "760 M" or "1.3 B".** A published pair really had 1,947 M and 6,394 M parameters: {larger:.1f} and
        {largest:.1f} GB, where 760 M have {mid:.1f}. That is why it filled so much memory. Count before you compare.
    """)


# ----- recipes


@dataclass(frozen=True)
class Recipe:
    """A recipe and the line that starts it."""

    name: str

    @property
    def path(self) -> str:
        return f"recipes/{self.name}.yaml"

    @property
    def launch_line(self) -> str:
        """The line in the recipe's head, as it stands there, with continued lines indented by four."""
        if self.name == "demo":
            return f"hope-hf train {self.path} --output_dir runs/demo"
        head = (ROOT / self.path).read_text(encoding="utf-8")
        launched = rf"accelerate launch [^`]*?run_clm\.py {self.path}"
        found = re.search(rf"^#   (hope-hf train {self.path}|{launched})", head, re.MULTILINE | re.DOTALL)
        return re.sub(r"\n#\s+", "\n    ", found[1])

    @property
    def planner_words(self) -> list[str]:
        """The planner's arguments for this launch. The first phase names the model of a second one."""
        words = self.launch_line.replace("\\\n", " ").split()
        renamed = {"--config_file": "--accelerate_config", "--num_processes": "--world_size"}
        if "run_clm.py" in words:
            launch = [renamed.get(word, word) for word in words[2 : words.index("run_clm.py")]]
        else:
            launch = ["--accelerate_config", "accelerate_configs/single.yaml"]
        source = (yaml.safe_load((ROOT / self.path).read_text(encoding="utf-8"))).get("model_name_or_path")
        return [str(ROOT / self.path), *launch, *(["--config_name", Path(source).name] if source else [])]

    def question(self, *words: str) -> Question:
        return parse([*self.planner_words, "--gpu", ",".join(GPUS[self.name]), *words])

    def memory(self, *words: str, **step) -> Memory:
        question = self.question(*words)
        return question.memory(question.launch, replace(question.step, **step))


def launch_lines() -> str:
    return "```\n" + "".join(f"{Recipe(name).launch_line}\n" for name in GPUS) + "```\n"


@cache
def recipe_row(name: str) -> list[str]:
    question = Recipe(name).question()
    found = settings(question)
    cells = []
    for gpu in question.gpus:
        one = verdict(question, found, gpu, None)
        if not one.fits:
            raise ValueError(f"{name}: does not fit {gpu.name}; change GPUS in docs/planned.py.")
        money = one.days * 24 * question.launch.world_size * PRICES[gpu.name]
        time = f"{one.days:.1f} days" if one.days >= 0.95 else f"{24 * one.days:.1f} hours"
        cells.append(f"{gpu.name}: {time}, {money:,.0f}" if money >= 1 else f"{gpu.name}: < 1")
    return [
        f"`{name}`",
        str(question.launch.world_size),
        f"{question.tokens_per_step:,}",
        f"{question.args.max_train_steps:,}",
        f"{question.total_tokens / 1e9:.3g}",
        f"{found[0].memory.peak / GIB:.1f}",
        "; ".join(cells),
    ]


def needs() -> str:
    prices = ", ".join(f"{name} at {price}" for name, price in PRICES.items())
    heads = ["recipe", "GPUs", "tokens per step", "steps", "tokens, 10^9", "GiB per GPU", "time and cost"]
    text = textwrap.fill(f"Prices per GPU and hour are assumed: {prices}.", 119, break_on_hyphens=False)
    return f"{text}\n\n{table(heads, list(map(recipe_row, GPUS)))}"


def recomputed() -> str:
    peaks = [Recipe(name).memory("--gradient_checkpointing", "false").peak for name in RECOMPUTED]
    *sizes, last = (f"{peak / GIB:.0f}" for peak in peaks)
    llama = Recipe("llama_7b")
    reduced, held = llama.memory(), llama.memory(sync_each_batch=False)
    return points(f"""
        **Blocks are recomputed** in all recipes of HOPE above the demo. Without it they would need {", ".join(sizes)}
        and {last} GiB (in the order of the table), more than the smallest GPU of their rows has.

        **`llama_7b`** trains under FULL_SHARD with `--sync_each_batch`: gradients are reduced after each of the four
        batches, and a process needs {reduced.peak / GIB:.1f} GiB. Without the flag every process would hold
        {held.between_batches / GIB:.1f} GiB of gradients between batches and need {held.peak / GIB:.1f} GiB, more than
        a GPU of 40 GB has to give. Its batch has one row: transformers' flash attention keeps the documents of a row
        apart only there. No process builds the whole model (`init: sharded`) or gathers it (`save_sharded`), so its
        last checkpoint has the weights in parts: the recipe's head has the command that joins them.
    """)


PAGE = ROOT / "docs/distributed.md"
BLOCKS = (states, accumulated, models, sent, mistakes, launch_lines, needs, recomputed)


def rendered() -> str:
    """The page with its blocks written anew."""
    blocks = {block.__name__: block for block in BLOCKS}
    text = PAGE.read_text(encoding="utf-8")
    text = BLOCK.sub(lambda found: found[1] + blocks.pop(found[2])() + found[4], text)
    if blocks:
        raise ValueError(f"{PAGE.name} has no place for {', '.join(blocks)}.")
    return text


if __name__ == "__main__":
    PAGE.write_text(rendered(), encoding="utf-8")
