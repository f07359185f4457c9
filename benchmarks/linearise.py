"""Do memories beside a window take over what full attention reads beyond it? Results: docs/log/linearise.md.

The source is a converted model whose layers have a window. In some of them each head of queries gets a memory under
the delta rule (`hope_hf.model.memory_delta`), with the attention's own queries, keys, values and `o_proj`. Memories
of a layer are trained alone: what they add shall be full attention's output minus the window's, both on the layer's
input in the model with full attention. No gradient passes through the model. Then facts of a text are asked for.

Axes: B row, T token, H head of queries, D head width.
"""

import argparse
import copy
import json
import random
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear, logsigmoid, normalize
from transformers import AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from hope_hf import HopeCache, HopeForCausalLM
from hope_hf.data import plain_ids
from hope_hf.evaluation.recall.answers import FORMS, answers_of
from hope_hf.evaluation.recall.facts import TextWithFacts, text_with_facts
from hope_hf.evaluation.recall.kinds import FACTS_OF_A_KIND
from hope_hf.evaluation.recall.suite import Tally
from hope_hf.model.attention import HopeAttention
from hope_hf.model.memory_delta import DeltaMemories
from hope_hf.model.memory_scan import ScanState, Tokens
from hope_hf.model.mixers import register
from hope_hf.model.window_attention import HopeWindowAttention, WindowState
from hope_hf.model.window_plan import WindowSizes, plan_window, window_angles
from hope_hf.retain.texts import paragraphs_of

KIND = "window_with_memories"
# tokens of a memory's chunk, and of a call that reads a test's text
CHUNK, PIECE = 64, 512
# tokens between a training fact and its repetition: more than the window
FAR = 560
# learning rate of gates over that of maps: a gate is a sum of hundreds of inputs
GATE_STEP = 0.03

# Training facts: a statement that ends on its answer, a question, and the answers. None is of the recall suite.
TRADES = "baker cooper glover mason potter saddler tanner weaver thatcher farrier chandler fuller".split()
COLOURS = "amber azure crimson green grey indigo ivory purple scarlet silver violet yellow".split()
TOWNS = "Ashby Belford Carlow Dorset Evesham Frome Grantham Hexham Ilkley Kendal Louth Malton".split()
PEOPLE = "Agnes Bertram Clara Dorothy Edmund Felix Gilbert Harriet Isabel Jasper Leonard Matilda".split()
NUMBERS = [str(number) for number in range(113, 990, 73)]
TRAINING_KINDS = (
    ("{s} earned a living as a", "What was the trade of {s}?", TRADES),
    ("The sails of the brig {s} were dyed", "Which colour had the sails of the brig {s}?", COLOURS),
    ("The road past {s} farm leads to", "Where does the road past {s} farm lead?", TOWNS),
    ("The heir of the estate {s} was little", "Who was the heir of {s}?", PEOPLE),
    ("In the register the page of {s} is page", "On which page of the register is {s}?", NUMBERS),
    ("{s} was born in the town of", "Where was {s} born?", TOWNS),
    ("The password of the guild of {s} was", "What was the password of {s}?", COLOURS + TRADES),
    ("- {s}:", "{s}?", NUMBERS + PEOPLE),
)
SYLLABLES = "ba chi do fre ga hu ja lo mi nu po ri sa te vo wy ze".split()


class Fact(NamedTuple):
    """A training fact, and the index of the token behind its last mention."""

    statement: str
    question: str
    answer: str
    stop: int


class Context(NamedTuple):
    """A training text [1, T], and whether a token is before one of the answer to a fact that was said long ago [T]."""

    ids: Tensor
    is_asked: Tensor


class Contexts:
    """Paragraphs with made-up facts between them, which are said or asked again further on."""

    def __init__(self, tokenizer, text: str, length: int, seed: int):
        self.tokenizer = tokenizer
        self.length = length
        self.draw = random.Random(seed)
        self.paragraphs = paragraphs_of(text)

    def make(self) -> Context:
        """The next context."""
        ids = []
        asked = []
        facts = []
        while len(ids) < self.length:
            paragraph = self.draw.choice(self.paragraphs)
            ids += self._ids(paragraph)[:80]
            for _ in range(2):
                last_stop = len(ids) - FAR
                old_facts = [fact for fact in facts if fact.stop < last_stop]
                is_old = bool(old_facts) and self.draw.random() < 0.7
                fact = self.draw.choice(old_facts) if is_old else self._fact()
                prompt = fact.statement
                if is_old and self.draw.random() < 0.3:
                    prompt = f"{fact.question} It is"
                ids += self._ids(prompt)
                answer_ids = plain_ids(self.tokenizer, f" {fact.answer}")
                if is_old:
                    before_answer = len(ids) - 1
                    asked += range(before_answer, before_answer + len(answer_ids))
                    facts.remove(fact)
                ids += answer_ids
                ids += plain_ids(self.tokenizer, ".")
                said = fact._replace(stop=len(ids))
                facts.append(said)
        is_asked = torch.zeros(len(ids), dtype=torch.bool)
        is_asked[asked] = True
        return Context(
            ids=torch.tensor([ids])[:, : self.length],
            is_asked=is_asked[: self.length],
        )

    def _fact(self) -> Fact:
        statement, question, answers = self.draw.choice(TRAINING_KINDS)
        syllables = self.draw.choices(SYLLABLES, k=3)
        subject = "".join(syllables).capitalize()
        return Fact(
            statement=statement.format(s=subject),
            question=question.format(s=subject),
            answer=self.draw.choice(answers),
            stop=0,
        )

    def _ids(self, text: str) -> list[int]:
        return plain_ids(self.tokenizer, f"\n\n{text}")


class HeadMemories(nn.Module):
    """A memory for each head of queries, with the keys and values of its group."""

    def __init__(self, heads: int, width: int, hidden_size: int):
        super().__init__()
        self.heads = heads
        identity = torch.eye(width).expand(heads, -1, -1)
        self.query_map = nn.Parameter(identity.clone())
        self.key_map = nn.Parameter(identity.clone())
        self.query_shift = nn.Parameter(torch.zeros(heads, 1, width))
        self.key_shift = nn.Parameter(torch.zeros(heads, 1, width))
        # of the rate (at first 0.12), the decay (memories halve in 2,000 tokens) and the share of the output
        self.gate_weight = nn.Parameter(torch.zeros(3 * heads, hidden_size))
        starts = torch.tensor([-2.0, -8.0, 0.0])
        self.gate_bias = nn.Parameter(starts.repeat_interleave(heads))

    def forward(
        self, queries: Tensor, keys: Tensor, values: Tensor, hidden_states: Tensor, memories: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Reads [B, T, H D] times their share, and the memories after the text [B, H, D, D].

        Queries are [B, H, T, D]; several of them share a head of keys and values.
        """
        rows, heads, _, width = queries.shape
        group = heads // keys.shape[1]
        keys = keys.repeat_interleave(group, dim=1)
        values = values.repeat_interleave(group, dim=1)
        unit_queries = normalize(queries @ self.query_map + self.query_shift, dim=-1)
        unit_keys = normalize(keys @ self.key_map + self.key_shift, dim=-1)
        gates = linear(hidden_states, self.gate_weight, self.gate_bias)
        rate, decay, share = gates.transpose(1, 2).split(heads, dim=1)
        if memories is None:
            memories = values.new_zeros(rows, heads, width, width)
        tokens = Tokens(
            keys=unit_keys,
            values=values,
            own_values=values,
            queries=unit_queries,
            rate=rate.sigmoid(),
            # minus softplus
            log_retention=logsigmoid(-decay),
        )
        reads, memories = self.scan(tokens, memories)
        shared = reads * share.unsqueeze(-1)
        return shared.transpose(1, 2).flatten(2), memories

    @staticmethod
    def scan(tokens: Tokens, memories: Tensor) -> tuple[Tensor, Tensor]:
        """Reads [B, H, T, D], and the memories after the text [B, H, D, D]."""
        heads = memories.shape[:2]
        memory = memories.flatten(0, 1)
        initial = torch.zeros_like(memory)
        rule = DeltaMemories(None, (), initial, value_share=0.0, rate_factors=(1.0,))
        chunks_of_streams = [stream.flatten(0, 1).split(CHUNK, dim=1) for stream in tokens]
        reads = []
        for streams in zip(*chunks_of_streams, strict=True):
            state = ScanState(current=(memory,), chunk_start=(), conv_tail=None)
            read, (memory,) = rule.write_and_read(state, Tokens(*streams))
            reads.append(read)
        all_reads = torch.cat(reads, dim=1)
        return all_reads.unflatten(0, heads), memory.unflatten(0, heads)


class MemoriesState(NamedTuple):
    """A window's keys and values, and the memories [B, H, D, D]."""

    ring_keys: Tensor
    ring_values: Tensor
    memories: Tensor


class WindowWithMemories(HopeWindowAttention):
    """Attention with a window, and memories whose output is added."""

    state_class = MemoriesState

    def __init__(self, config, layer_idx: int):
        super().__init__(config, layer_idx)
        self.memories = HeadMemories(config.num_attention_heads, config.head_dim, config.hidden_size)

    def forward(self, hidden_states: Tensor, state: MemoriesState | None = None, need_state: bool = False, **context):
        """As the window attention."""
        ring = memories = state_after = None
        if state is not None:
            ring = WindowState(state.ring_keys, state.ring_values)
            memories = state.memories
        mixed, ring, _ = super().forward(hidden_states, ring, need_state=need_state, **context)
        added, memories = self.add(hidden_states, memories)
        if need_state:
            state_after = MemoriesState(*ring, memories)
        return mixed + added, state_after, None

    def add(self, hidden_states: Tensor, memories: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """What the memories add [B, T, hidden_size], and their state."""
        queries, keys, values = self.project(hidden_states)
        reads, memories = self.memories(queries, keys, values, hidden_states, memories)
        return self.o_proj(reads), memories


register(KIND, WindowWithMemories)


def with_kinds(source: HopeForCausalLM, layers: Iterable[int], kind: str) -> HopeForCausalLM:
    """The source with some layers of another kind; it shares the weights, and memories begin anew."""
    config = copy.deepcopy(source.config)
    for layer in layers:
        config.layer_types[layer] = kind
    if "window_attention" not in config.layer_types:
        config.sliding_window = None
    model = HopeForCausalLM(config).eval()
    model.load_state_dict(source.state_dict(), strict=False, assign=True)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".memories." in name)
    return model


class Target(NamedTuple):
    """A layer's input, full attention's output, and what the window's output lacks of it [1, T, hidden_size]."""

    hidden_states: Tensor
    full_output: Tensor
    lacking: Tensor


@torch.no_grad()
def targets_of(source: HopeForCausalLM, ids: Tensor, layers: list[int]) -> dict[int, Target]:
    """The targets of some layers, in the model with full attention in all of them."""
    model = source.model
    config = source.config
    hidden_states = model.embed_tokens(ids)
    plan = plan_window(WindowSizes.of(config), hidden_states.dtype, ids.shape, ids.device)
    angles_of_window = window_angles(config, model.rotary_emb, hidden_states, plan)
    positions = torch.arange(ids.shape[1]).unsqueeze(0)
    angles = model.rotary_emb(hidden_states, positions)
    last = max(layers)
    targets = {}
    for index, block in enumerate(model.layers[: last + 1]):
        inputs = block.input_layernorm(hidden_states)
        # the window's class, without its window
        full_output, *_ = HopeAttention.forward(block.mixer, inputs, position_embeddings=angles)
        if index in layers:
            window_output, *_ = block.mixer(inputs, window=plan, window_angles=angles_of_window)
            lacking = full_output - window_output
            targets[index] = Target(inputs, full_output, lacking)
        hidden_states = block.continuum(hidden_states + full_output)
    return targets


def norm(x: Tensor, weights: Tensor) -> Tensor:
    """Root of the sum of squares of [1, T, hidden_size], with weights of tokens [T]."""
    squares = weights.unsqueeze(-1) * x**2
    return squares.sum().sqrt()


def relative_error(output: Tensor, target: Tensor, weights: Tensor) -> Tensor:
    """Squared error over the squared norm of the target."""
    error = norm(output - target, weights)
    ratio = error / norm(target, weights)
    return ratio**2


def table_of_layers(source: HopeForCausalLM, context: Context) -> list[dict]:
    """Norm of what each layer's window lacks over that of full attention's output: everywhere, and where asked."""
    layers = range(source.config.num_hidden_layers)
    asked = context.is_asked.float()
    far = torch.ones_like(asked)
    far[:FAR] = 0
    rows = []
    for layer, target in targets_of(source, context.ids, layers).items():
        lacks = norm(target.lacking, far) / norm(target.full_output, far)
        lacks_asked = norm(target.lacking, asked) / norm(target.full_output, asked)
        row = {
            "layer": layer,
            "lacks": lacks.item(),
            "lacks_asked": lacks_asked.item(),
        }
        rows.append(row)
    return rows


@torch.no_grad()
def table_of_memories(model: HopeForCausalLM, targets: dict[int, Target], context: Context) -> list[dict]:
    """The share of each target that the memories explain: everywhere, and where asked."""
    asked = context.is_asked.float()
    everywhere = torch.ones_like(asked)
    rows = []
    for layer, target in targets.items():
        mixer = model.model.layers[layer].mixer
        added, _ = mixer.add(target.hidden_states)
        error = relative_error(added, target.lacking, everywhere)
        error_asked = relative_error(added, target.lacking, asked)
        row = {
            "layer": layer,
            "explained": 1 - error.item(),
            "explained_asked": 1 - error_asked.item(),
        }
        rows.append(row)
    return rows


def mean_table(tables: list[list[dict]]) -> list[dict]:
    """The mean of tables that have the same rows."""
    table = []
    for rows in zip(*tables, strict=True):
        means = {}
        for name in rows[0]:
            values = [row[name] for row in rows]
            means[name] = sum(values) / len(values)
        means["layer"] = rows[0]["layer"]
        table.append(means)
    return table


def make_optimiser(model: HopeForCausalLM, learning_rate: float) -> torch.optim.Optimizer:
    """Adam; gates have a lower learning rate."""
    maps = []
    gates = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            group = gates if name.endswith("gate_weight") else maps
            group.append(parameter)
    groups = [{"params": maps}, {"params": gates, "lr": GATE_STEP * learning_rate}]
    return torch.optim.Adam(groups, lr=learning_rate, betas=(0.9, 0.99))


def train_step(model: HopeForCausalLM, targets: dict[int, Target], weights: Tensor, optimiser) -> float:
    """One step of all layers' memories, each on its own loss; the mean loss."""
    losses = []
    for layer, target in targets.items():
        added, _ = model.model.layers[layer].mixer.add(target.hidden_states)
        loss = relative_error(added, target.lacking, weights)
        loss.backward()
        losses.append(loss.item())
    optimiser.step()
    optimiser.zero_grad()
    return sum(losses) / len(losses)


@torch.no_grad()
def measure(model: HopeForCausalLM, tokenizer, texts: list[TextWithFacts], form: str) -> dict:
    """Mean loss of the texts, and how their facts are answered after reading."""
    tally = Tally([], [], [])
    losses = []
    for text in texts:
        cache = HopeCache(model.config)
        losses.append(read(model, cache, text.ids))
        for first in range(0, len(text.facts), FACTS_OF_A_KIND):
            facts = text.facts[first : first + FACTS_OF_A_KIND]
            prompts = [FORMS[form](fact) for fact in facts]
            answers = [fact.answer for fact in facts]
            found = answers_of(model, tokenizer, cache, prompts, answers)
            tally.add(found)
    row = tally.row()
    row["text_loss"] = sum(losses) / len(losses)
    return row


def read(model: HopeForCausalLM, cache: HopeCache, ids: list[int]) -> float:
    """Mean loss of a text in nats, while the cache reads it."""
    tokens = torch.tensor(ids)
    logits = []
    for piece in tokens.split(PIECE):
        result = model(piece.unsqueeze(0), cache=cache)
        logits.append(result.logits[0])
    loss = cross_entropy(torch.cat(logits)[:-1], tokens[1:])
    return loss.item()


def report(table: str, *rows: dict) -> None:
    """A line of JSON for each row."""
    for row in rows:
        rounded = {name: round(value, 4) for name, value in row.items()}
        print(json.dumps({"table": table, **rounded}), flush=True)


def add_test_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of the model, the texts and the test's facts."""
    parser.add_argument("--model", required=True, help="a converted model, all of whose layers have a window")
    parser.add_argument("--novel", required=True, help="its first fifth trains, its last half holds the test's facts")
    parser.add_argument("--text", required=True, help="another text that trains")
    parser.add_argument("--form", choices=tuple(FORMS), default="cloze", help="of asking")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--test_seeds", type=int, nargs="+", default=[42, 43])
    parser.add_argument("--test_length", type=int, default=4096, help="tokens of a test's text")


def texts_of(tokenizer, args: argparse.Namespace) -> tuple[str, list[TextWithFacts]]:
    """The text that trains, and the test's texts."""
    novel = Path(args.novel).read_text(encoding="utf-8")
    other_text = Path(args.text).read_text(encoding="utf-8")
    first_fifth = novel[: len(novel) // 5]
    last_half = novel[len(novel) // 2 :]
    tests = [text_with_facts(tokenizer, last_half, args.test_length, seed) for seed in args.test_seeds]
    return f"{first_fifth}\n\n{other_text}", tests


def parse(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_test_flags(parser)
    parser.add_argument("--layers", type=int, nargs="+", help="default: the third of them that lacks most")
    parser.add_argument("--context", type=int, default=2048, help="tokens of a training text")
    parser.add_argument("--measure_at", type=int, nargs="*", default=[25_000, 50_000, 100_000], help="training tokens")
    parser.add_argument("--passes", type=int, default=2, help="steps on each training text")
    parser.add_argument("--learning_rate", type=float, default=1e-2)
    parser.add_argument("--asked_weight", type=float, default=1.0, help="of tokens before answers in the loss")
    return parser.parse_args(words)


def train(
    model: HopeForCausalLM,
    source: HopeForCausalLM,
    contexts: Contexts,
    layers: list[int],
    args: argparse.Namespace,
) -> Iterator[dict]:
    """Tokens and CPU minutes so far, whenever the memories are to be measured."""
    optimiser = make_optimiser(model, args.learning_rate)
    tokens = 0
    seconds = 0.0
    for stop in args.measure_at:
        while tokens < stop:
            start = time.process_time()
            context = contexts.make()
            targets = targets_of(source, context.ids, layers)
            weights = 1 + (args.asked_weight - 1) * context.is_asked
            for _ in range(args.passes):
                loss = train_step(model, targets, weights, optimiser)
            tokens += args.context
            seconds += time.process_time() - start
            print(f"{tokens:,} tokens, {seconds / 60:.1f} CPU minutes, loss {loss:.4f}", flush=True)
        yield {"tokens": tokens, "cpu_minutes": seconds / 60}


def main(words: list[str] | None = None) -> None:
    args = parse(words)
    source = HopeForCausalLM.from_pretrained(args.model).eval().requires_grad_(False)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    training_text, tests = texts_of(tokenizer, args)
    contexts = Contexts(tokenizer, training_text, args.context, args.seed)
    held_out = Contexts(tokenizer, training_text, args.context, args.seed + 1000)
    held_out_contexts = [held_out.make(), held_out.make()]
    rows = mean_table([table_of_layers(source, context) for context in held_out_contexts])
    report("layers", *rows)
    rows.sort(key=lambda row: row["lacks"], reverse=True)
    most = [row["layer"] for row in rows[: len(rows) // 3]]
    layers = args.layers or sorted(most)
    model = with_kinds(source, layers, KIND)
    for progress in train(model, source, contexts, layers, args):
        tables = []
        for context in held_out_contexts:
            targets = targets_of(source, context.ids, layers)
            tables.append(table_of_memories(model, targets, context))
        report("explained", *mean_table(tables))
        report("memories", progress | measure(model, tokenizer, tests, args.form))
    report("window", measure(source, tokenizer, tests, args.form))
    full_here = with_kinds(source, layers, "full_attention")
    report("full attention in these layers", measure(full_here, tokenizer, tests, args.form))
    full = with_kinds(source, range(len(rows)), "full_attention")
    report("full attention", measure(full, tokenizer, tests, args.form))


if __name__ == "__main__":
    main()
