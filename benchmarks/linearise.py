"""Do memories beside a window take over what full attention reads beyond it? See docs/log/linearise.md.

A converted model whose layers have a window is the source. In some layers each head of queries gets a memory under the
delta rule, with the attention's own queries, keys and values, whose reads go through its own `o_proj`. Each layer's
memories are trained alone: what they add shall be full attention's output minus the window's, on the same inputs. No
gradient passes through the model. Then facts that a text stated beyond the window are asked for.

Axes: B row, T token, H head of queries, D head width.
"""

import argparse
import copy
import json
import random
import re
import sys
import time
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear, logsigmoid, normalize
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from hope_hf import HopeCache, HopeForCausalLM
from hope_hf.data import plain_ids
from hope_hf.evaluation.recall.answers import FORMS, answers_of
from hope_hf.evaluation.recall.facts import TextWithFacts, text_with_facts
from hope_hf.evaluation.recall.kinds import FACTS_OF_A_KIND
from hope_hf.model.memory_delta import DeltaMemories
from hope_hf.model.memory_scan import ScanState, Tokens
from hope_hf.model.mixers import register
from hope_hf.model.window_attention import HopeWindowAttention, WindowState, plan_window, window_positions

KIND = "window_with_memories"
# tokens of a memory's chunk, and of a call that reads a text
CHUNK, PIECE = 64, 512
# tokens between a training fact and its repetition: more than the window
FAR = 560
ASKED_FORMS = ("cloze", "question")

# Training facts: a statement that ends on its answer, a question, and the answers. None is of the recall suite.
TRADES = "baker cooper glover mason potter saddler tanner weaver thatcher farrier chandler fuller".split()
COLOURS = "amber azure crimson green grey indigo ivory purple scarlet silver violet yellow".split()
TOWNS = "Ashby Belford Carlow Dorset Evesham Frome Grantham Hexham Ilkley Kendal Louth Malton".split()
PEOPLE = "Agnes Bertram Clara Dorothy Edmund Felix Gilbert Harriet Isabel Jasper Leonard Matilda".split()
NUMBERS = [str(number) for number in range(113, 990, 73)]
TRAINING_KINDS = (
    ("{s} earned a living as a {a}", "What was the trade of {s}?", TRADES),
    ("The sails of the brig {s} were dyed {a}", "Which colour had the sails of the brig {s}?", COLOURS),
    ("The road past {s} farm leads to {a}", "Where does the road past {s} farm lead?", TOWNS),
    ("The heir of the estate {s} was little {a}", "Who was the heir of {s}?", PEOPLE),
    ("In the register the page of {s} is page {a}", "On which page of the register is {s}?", NUMBERS),
    ("{s} was born in the town of {a}", "Where was {s} born?", TOWNS),
    ("The password of the guild of {s} was {a}", "What was the password of {s}?", COLOURS + TRADES),
    ("- {s}: {a}", "{s}?", NUMBERS + PEOPLE),
)
SYLLABLES = "ba chi do fre ga hu ja lo mi nu po ri sa te vo wy ze".split()


class MemoriesState(NamedTuple):
    """A window's keys and values, and the memories [B, H, D, D]."""

    ring_keys: Tensor
    ring_values: Tensor
    memories: Tensor


class HeadMemories(nn.Module):
    """A memory for each head of queries, with the keys and values of its group."""

    has_initial_values = True

    def __init__(self, heads: int, width: int, hidden_size: int):
        super().__init__()
        self.heads, self.width = heads, width
        self.query_map = nn.Parameter(torch.empty(heads, width, width))
        self.key_map = nn.Parameter(torch.empty(heads, width, width))
        self.query_shift = nn.Parameter(torch.empty(heads, 1, width))
        self.key_shift = nn.Parameter(torch.empty(heads, 1, width))
        # of writing, forgetting and the share in the output
        self.gate_weight = nn.Parameter(torch.empty(3 * heads, hidden_size))
        self.gate_bias = nn.Parameter(torch.empty(3 * heads))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Maps begin at the identity, rates at 0.12, memories halve in 2,000 tokens, and the output has no share."""
        identity = torch.eye(self.width).expand(self.heads, -1, -1)
        self.query_map.copy_(identity)
        self.key_map.copy_(identity)
        for parameter in (self.query_shift, self.key_shift, self.gate_weight):
            parameter.zero_()
        starts = torch.tensor([-2.0, -8.0, 0.0])
        self.gate_bias.copy_(starts.repeat_interleave(self.heads))

    def forward(
        self, queries: Tensor, keys: Tensor, values: Tensor, hidden_states: Tensor, memories: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Reads [B, T, H D] with their share, and the memories after the text [B, H, D, D]."""
        rows, heads, _, width = queries.shape
        group = heads // keys.shape[1]
        keys = keys.repeat_interleave(group, dim=1)
        values = values.repeat_interleave(group, dim=1).flatten(0, 1)
        unit_queries = normalize(queries @ self.query_map + self.query_shift, dim=-1).flatten(0, 1)
        unit_keys = normalize(keys @ self.key_map + self.key_shift, dim=-1).flatten(0, 1)
        gates = linear(hidden_states, self.gate_weight, self.gate_bias).transpose(1, 2)
        rate, decay, share = gates.split(heads, dim=1)
        rate = rate.sigmoid().flatten(0, 1)
        # minus softplus
        log_retention = logsigmoid(-decay).flatten(0, 1)
        initial = values.new_zeros(rows * heads, width, width)
        rule = DeltaMemories(None, (), initial, value_share=0.0, rate_factors=(1.0,))
        memory = initial if memories is None else memories.flatten(0, 1)
        reads = []
        streams = (unit_keys, values, values, unit_queries, rate, log_retention)
        for chunk in zip(*(stream.split(CHUNK, dim=1) for stream in streams), strict=True):
            state = ScanState(current=(memory,), chunk_start=(), conv_tail=None)
            read, (memory,) = rule.write_and_read(state, Tokens(*chunk))
            reads.append(read)
        all_reads = torch.cat(reads, dim=1).unflatten(0, (rows, heads))
        shared = all_reads * share.unsqueeze(-1)
        return shared.transpose(1, 2).flatten(2), memory.unflatten(0, (rows, heads))


class WindowWithMemories(HopeWindowAttention):
    """Attention with a window, and memories whose output is added."""

    state_class = MemoriesState

    def __init__(self, config, layer_idx: int):
        super().__init__(config, layer_idx)
        self.memories = HeadMemories(config.num_attention_heads, config.head_dim, config.hidden_size)

    def forward(self, hidden_states: Tensor, state: MemoriesState | None = None, *, need_state: bool = False, **context):
        """As the window attention."""
        ring = memories = None
        if state is not None:
            ring = WindowState(state.ring_keys, state.ring_values)
            memories = state.memories
        mixed, ring, _ = super().forward(hidden_states, ring, need_state=need_state, **context)
        added, memories = self.add(hidden_states, memories)
        after = MemoriesState(*ring, memories) if need_state else None
        return mixed + added, after, None

    def add(self, hidden_states: Tensor, memories: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """What the memories add [B, T, hidden_size], and their state."""
        with torch.no_grad():
            projected = self.project(hidden_states)
        reads, memories = self.memories(*projected, hidden_states, memories)
        return self.o_proj(reads), memories


register(KIND, WindowWithMemories)


def with_layers(source: PreTrainedModel, kinds: list[str], window: int | None) -> PreTrainedModel:
    """The source with layers of other kinds; it shares the weights, and memories are at their start."""
    config = copy.deepcopy(source.config)
    config.layer_types = kinds
    config.sliding_window = window
    model = type(source).from_pretrained(None, config=config, state_dict=source.state_dict()).eval()
    model.requires_grad_(False)
    for module in model.modules():
        if isinstance(module, HeadMemories):
            module.reset_parameters()
            module.requires_grad_(True)
    return model


class Context(NamedTuple):
    """A training text [1, T], and the tokens before the answers of facts stated more than a window ago [A]."""

    ids: Tensor
    asked: Tensor


class Contexts:
    """Paragraphs with made-up facts between them, which are said or asked again further on."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, texts: list[str], length: int, seed: int):
        self.tokenizer, self.length = tokenizer, length
        self.draw = random.Random(seed)
        self.paragraphs = []
        for text in texts:
            self.paragraphs += [" ".join(part.split()) for part in re.split(r"\n\s*\n", text) if part.strip()]

    def make(self) -> Context:
        """The next context."""
        ids: list[int] = []
        asked: list[int] = []
        # facts, with the index behind their last mention
        facts: list[tuple[str, str, str, int]] = []
        while len(ids) < self.length:
            ids += self._ids(f"\n\n{self.draw.choice(self.paragraphs)}")[:80]
            for _ in range(2):
                old = [fact for fact in facts if fact[3] < len(ids) - FAR]
                is_old = bool(old) and self.draw.random() < 0.7
                fact = self.draw.choice(old) if is_old else self._fact()
                statement, question, answer, _ = fact
                prompt = f"\n\n{statement}"
                if is_old and self.draw.random() < 0.3:
                    prompt = f"\n\n{question} It is"
                ids += self._ids(prompt)
                answer_ids = self._ids(f" {answer}")
                if is_old:
                    asked += range(len(ids) - 1, len(ids) - 1 + len(answer_ids))
                    facts.remove(fact)
                ids += answer_ids + self._ids(".")
                facts.append((statement, question, answer, len(ids)))
        inside = [index for index in asked if index < self.length]
        return Context(torch.tensor([ids[: self.length]]), torch.tensor(inside))

    def _fact(self) -> tuple[str, str, str, int]:
        statement, question, answers = self.draw.choice(TRAINING_KINDS)
        subject = "".join(self.draw.choices(SYLLABLES, k=3)).capitalize()
        before_answer = statement.format(s=subject, a="").rstrip()
        return before_answer, question.format(s=subject), self.draw.choice(answers), 0

    def _ids(self, text: str) -> list[int]:
        return plain_ids(self.tokenizer, text)


class Teacher:
    """Full attention, and the window's on the same inputs."""

    def __init__(self, source: PreTrainedModel):
        config = source.config
        self.window = source
        self.full = with_layers(source, ["full_attention"] * config.num_hidden_layers, None)
        self.records: dict[int, tuple[Tensor, Tensor]] = {}
        for index, block in enumerate(self.full.model.layers):
            block.mixer.register_forward_hook(self._recorder(index))

    def _recorder(self, index: int):
        def record(_, inputs, outputs):
            self.records[index] = inputs[0], outputs[0]

        return record

    @torch.no_grad()
    def targets(self, ids: Tensor, layers: list[int]) -> dict[int, tuple[Tensor, Tensor, Tensor]]:
        """Of each layer its input, full attention's output, and what the window's lacks of it [1, T, hidden_size]."""
        self.full.model(ids)
        config = self.window.config
        results = {}
        for layer in layers:
            hidden_states, full_output = self.records[layer]
            plan = plan_window(
                config.attention_sinks, config.sliding_window, hidden_states.dtype, ids.shape, ids.device
            )
            angles = window_positions(config, self.window.model.rotary_emb, hidden_states, plan)
            mixer = self.window.model.layers[layer].mixer
            window_output, *_ = mixer(hidden_states, window=plan, window_positions=angles)
            results[layer] = hidden_states, full_output, full_output - window_output
        self.records.clear()
        return results


def squared_error(output: Tensor, target: Tensor, asked: Tensor, weight: float) -> Tensor:
    """Squared error over the squared norm of the target; tokens before answers count `weight` times."""
    weights = torch.ones(target.shape[1], 1)
    weights[asked] = weight
    error = (weights * (output - target) ** 2).sum()
    return error / (weights * target**2).sum()


@torch.no_grad()
def table_of_layers(teacher: Teacher, contexts: list[Context]) -> list[dict]:
    """How much of each layer's output the window lacks: norms of the target over those of the output."""
    layers = list(range(teacher.window.config.num_hidden_layers))
    squares = torch.zeros(len(layers), 2, 2)
    for context in contexts:
        targets = teacher.targets(context.ids, layers)
        for layer, (_, full_output, target) in targets.items():
            for column, output in enumerate((target, full_output)):
                norms = output[0].square().sum(-1)
                squares[layer, 0, column] += norms[FAR:].sum()
                squares[layer, 1, column] += norms[context.asked].sum()
    shares = (squares[..., 0] / squares[..., 1]).sqrt().tolist()
    return [{"layer": layer, "lacks": share[0], "lacks_asked": share[1]} for layer, share in enumerate(shares)]


@torch.no_grad()
def explained(model: PreTrainedModel, teacher: Teacher, contexts: list[Context], layers: list[int]) -> list[dict]:
    """The share of the target's variance that each layer's memories explain, on contexts that are not trained on."""
    shares = torch.zeros(len(layers), 2)
    for context in contexts:
        targets = teacher.targets(context.ids, layers)
        for row, layer in enumerate(layers):
            hidden_states, _, target = targets[layer]
            added, _ = model.model.layers[layer].mixer.add(hidden_states)
            everywhere = squared_error(added, target, context.asked, 1.0)
            where_asked = squared_error(added[:, context.asked], target[:, context.asked], context.asked[:0], 1.0)
            shares[row] += 1 - torch.stack([everywhere, where_asked])
    shares /= len(contexts)
    return [
        {"layer": layer, "explained": share[0], "explained_asked": share[1]}
        for layer, share in zip(layers, shares.tolist(), strict=True)
    ]


def train_step(
    model: PreTrainedModel, targets: dict, context: Context, optimiser: torch.optim.Optimizer, weight: float
) -> float:
    """One step of all layers' memories, each on its own loss; the mean loss."""
    losses = []
    for layer, (hidden_states, _, target) in targets.items():
        added, _ = model.model.layers[layer].mixer.add(hidden_states)
        loss = squared_error(added, target, context.asked, weight)
        loss.backward()
        losses.append(float(loss.detach()))
    optimiser.step()
    optimiser.zero_grad()
    return sum(losses) / len(losses)


@torch.no_grad()
def measure(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: list[TextWithFacts]) -> dict:
    """Loss of the texts, and means of `right`, `greedy` and `tie` of all facts for each form of asking."""
    losses = []
    values: dict[str, list[Tensor]] = {}
    for text in texts:
        cache = HopeCache(model.config)
        logits = [model(piece, cache=cache).logits[0] for piece in torch.tensor([text.ids]).split(PIECE, dim=1)]
        losses.append(cross_entropy(torch.cat(logits)[:-1], torch.tensor(text.ids[1:])))
        for form in ASKED_FORMS:
            for first in range(0, len(text.facts), FACTS_OF_A_KIND):
                facts = text.facts[first : first + FACTS_OF_A_KIND]
                prompts = [FORMS[form](fact) for fact in facts]
                found = answers_of(model, tokenizer, cache, prompts, [fact.answer for fact in facts])
                values.setdefault(f"{form}_right", []).append(found.right().float())
                values.setdefault(f"{form}_greedy", []).append(found.greedy.float())
                values.setdefault(f"{form}_tie", []).append(found.ties())
    row = {"text_loss": float(torch.stack(losses).mean())}
    for name, parts in values.items():
        of_facts = torch.cat(parts)
        row[name] = float(of_facts.mean())
        row[f"{name}_stderr"] = float(of_facts.std() / len(of_facts) ** 0.5)
    return row


def report(kind: str, rows: list[dict]) -> None:
    """A line of JSON for each row."""
    for row in rows:
        rounded = {name: round(value, 4) for name, value in row.items()}
        print(json.dumps({"table": kind, **rounded}), flush=True)


def parse(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="a converted model, all of whose layers have a window")
    parser.add_argument("--novel", required=True, help="its first fifth trains, its last half holds the test's facts")
    parser.add_argument("--text", required=True, help="another text that trains")
    parser.add_argument("--layers", type=int, nargs="*", help="default: the third of them that lacks most")
    parser.add_argument("--choose_by", choices=("lacks", "lacks_asked"), default="lacks")
    parser.add_argument("--context", type=int, default=2048, help="tokens of a training text")
    parser.add_argument("--measure_at", type=int, nargs="+", default=[25_000, 50_000, 100_000, 200_000])
    parser.add_argument("--passes", type=int, default=2, help="steps on each training text")
    parser.add_argument("--learning_rate", type=float, default=3e-3)
    parser.add_argument("--asked_weight", type=float, default=1.0, help="of tokens before answers in the loss")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--test_seeds", type=int, nargs="+", default=[42, 43])
    parser.add_argument("--controls", action="store_true", help="measure the window and full attention as well")
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> None:
    args = parse(words)
    torch.manual_seed(args.seed)
    source = HopeForCausalLM.from_pretrained(args.model).eval().requires_grad_(False)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    novel = Path(args.novel).read_text(encoding="utf-8")
    training_texts = [novel[: len(novel) // 5], Path(args.text).read_text(encoding="utf-8")]
    contexts = Contexts(tokenizer, training_texts, args.context, args.seed)
    held_out = Contexts(tokenizer, training_texts, args.context, args.seed + 1000)
    held_out_contexts = [held_out.make() for _ in range(2)]
    tests = [text_with_facts(tokenizer, novel[len(novel) // 2 :], 4096, seed) for seed in args.test_seeds]
    teacher = Teacher(source)
    layer_rows = table_of_layers(teacher, held_out_contexts)
    report("layers", layer_rows)
    number = len(layer_rows) // 3
    most = sorted(layer_rows, key=lambda row: row[args.choose_by], reverse=True)[:number]
    layers = args.layers or sorted(row["layer"] for row in most)
    print(f"layers with memories: {layers}", flush=True)
    kinds = list(source.config.layer_types)
    for layer in layers:
        kinds[layer] = KIND
    model = with_layers(source, kinds, source.config.sliding_window)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimiser = torch.optim.Adam(parameters, lr=args.learning_rate, betas=(0.9, 0.99))
    if args.controls:
        report("full attention", [measure(teacher.full, tokenizer, tests)])
        report("window", [measure(model, tokenizer, tests)])
    tokens, spent = 0, 0.0
    for stop in args.measure_at:
        while tokens < stop:
            start = time.process_time()
            context = contexts.make()
            targets = teacher.targets(context.ids, layers)
            losses = [train_step(model, targets, context, optimiser, args.asked_weight) for _ in range(args.passes)]
            tokens += args.context
            spent += time.process_time() - start
            print(f"{tokens:,} tokens, {spent / 60:.1f} CPU minutes, loss {losses[0]:.4f}", flush=True)
        report("explained", explained(model, teacher, held_out_contexts, layers))
        row = {"tokens": tokens, "cpu_minutes": spent / 60}
        report("memories", [row | measure(model, tokenizer, tests)])


if __name__ == "__main__":
    main()
