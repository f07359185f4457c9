"""Do layers with a window answer what it has passed, if they keep the tokens that will be asked for?

Results: docs/log/linearise.md. Each head of keys keeps a fixed number of the tokens that left the window: those with
the highest scores, which a small map of the layer's input gives. It learns from the source with full attention how
much questions attend to a token, at any of their tokens. Scores of all heads are compared to share out the tokens
between the heads. No gradient passes through the model.

The state of this program grows with the text, and hides what was not kept: its results are those of a state of fixed
size. It takes one row without padding.

Axes: B row, T token, G head of keys, H head of queries, D head width, N question, C token of a question.
"""

import argparse
import heapq
from collections.abc import Iterator
from typing import NamedTuple

import torch
from linearise import add_test_flags, measure, report, texts_of, with_kinds
from retain_facts import AskedText, AskedTexts
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, gelu, scaled_dot_product_attention
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoTokenizer
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from hope_hf import HopeForCausalLM
from hope_hf.model.mixers import register
from hope_hf.model.modeling_hope import HopeBlock
from hope_hf.model.window_attention import HopeWindowAttention

KIND = "window_that_keeps"
# width of the map that scores tokens
HIDDEN = 64
# the fewest tokens that a head keeps
FEWEST = 16
# steps of a layer's scores, tokens of a step, learning rate
STEPS, BATCH, LEARNING_RATE = 1500, 1024, 2e-3


class Scores(nn.Module):
    """How much a token will be asked for after the window, for each head of keys: [..., hidden_size] to [..., G]."""

    def __init__(self, hidden_size: int, heads: int):
        super().__init__()
        self.up = nn.Linear(hidden_size, HIDDEN)
        self.down = nn.Linear(HIDDEN, heads)
        nn.init.zeros_(self.down.weight)
        nn.init.constant_(self.down.bias, -3.0)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.down(gelu(self.up(hidden_states)))


class RandomScores(nn.Module):
    """The control: scores that know nothing of a token."""

    def __init__(self, heads: int):
        super().__init__()
        self.heads = heads

    def forward(self, hidden_states: Tensor) -> Tensor:
        rows, length, _ = hidden_states.shape
        return torch.rand(rows, length, self.heads)


class KeepingState(NamedTuple):
    """Keys after rotation and values [1, G, T, D], and scores [1, G, T], of all tokens."""

    keys: Tensor
    values: Tensor
    scores: Tensor


class WindowThatKeeps(HopeWindowAttention):
    """Attention to the window, the sinks and the kept tokens, all at their distances."""

    state_class = KeepingState

    def __init__(self, config, layer_idx: int):
        super().__init__(config, layer_idx)
        # tokens that each head keeps
        self.kept = [FEWEST] * config.num_key_value_heads
        self.scores = Scores(config.hidden_size, config.num_key_value_heads)

    def forward(
        self,
        hidden_states: Tensor,
        state: KeepingState | None = None,
        *,
        window_positions,
        need_state: bool = False,
        **_,
    ):
        """As the window attention."""
        angles, _ = window_positions
        cosines, sines = angles
        queries, keys, values = self.project(hidden_states)
        queries, keys = apply_rotary_pos_emb(queries, keys, cosines[:, 0], sines[:, 0])
        scores = self.scores(hidden_states).transpose(1, 2)
        if state is not None:
            keys = torch.cat([state.keys, keys], dim=2)
            values = torch.cat([state.values, values], dim=2)
            scores = torch.cat([state.scores, scores], dim=2)
        mask = self._visible(scores[0], hidden_states.shape[1])
        group = queries.shape[1] // keys.shape[1]
        mask = mask.repeat_interleave(group, dim=0)
        reads = scaled_dot_product_attention(queries, keys, values, attn_mask=mask[None], enable_gqa=True)
        by_token = reads.transpose(1, 2)
        state_after = KeepingState(keys, values, scores) if need_state else None
        return self.o_proj(by_token.flatten(2)), state_after, None

    def _visible(self, scores: Tensor, count: int) -> Tensor:
        """Whether each of the last `count` queries sees a token [G, count, T], from all scores [G, T]."""
        window = self.config.sliding_window
        sinks = self.config.attention_sinks
        length = scores.shape[1]
        query = torch.arange(length - count, length)[:, None]
        token = torch.arange(length)
        distance = query - token
        is_near = (distance < window) | (token < sinks)
        lowest_of_heads = []
        for scores_of_head, kept in zip(scores, self.kept, strict=True):
            lowest_of_heads.append(self._lowest_kept(scores_of_head, kept, count))
        lowest = torch.stack(lowest_of_heads)
        is_kept = scores[:, None] >= lowest[..., None]
        return (is_near | is_kept) & (distance >= 0)

    def _lowest_kept(self, scores: Tensor, kept: int, count: int) -> Tensor:
        """Score of the worst token that a head keeps, at each of the last `count` queries; -inf while it keeps all."""
        first_query = len(scores) - count
        # tokens before it have left at earlier queries
        begin = max(self.config.attention_sinks, first_query - self.config.sliding_window)
        left_before = scores[self.config.attention_sinks : begin]
        best = left_before.topk(min(kept, len(left_before))).values.tolist()
        heapq.heapify(best)
        lowest = torch.full((count,), -torch.inf)
        for index in range(count):
            leaving = first_query + index - self.config.sliding_window
            if leaving >= begin:
                heapq.heappush(best, float(scores[leaving]))
            if len(best) > kept:
                heapq.heappop(best)
            if len(best) == kept:
                lowest[index] = best[0]
        return lowest

    @staticmethod
    def check_state(*_) -> None:
        """The state is this program's own."""


register(KIND, WindowThatKeeps)


class Attended(NamedTuple):
    """Inputs of attention [B, T, hidden_size]; queries [B, H, T, D], keys and values [B, G, T, D] after rotation."""

    inputs: Tensor
    queries: Tensor
    keys: Tensor
    values: Tensor


def project(block: HopeBlock, hidden_states: Tensor, angles: tuple[Tensor, Tensor]) -> Attended:
    """What a block's attention works with, of [B, T, hidden_size]."""
    inputs = block.input_layernorm(hidden_states)
    queries, keys, values = block.mixer.project(inputs)
    queries, keys = apply_rotary_pos_emb(queries, keys, *angles)
    return Attended(inputs, queries, keys, values)


def after(block: HopeBlock, hidden_states: Tensor, reads: Tensor) -> Tensor:
    """The block's output, from what its heads have read [B, H, T, D]."""
    mixed = block.mixer.o_proj(reads.transpose(1, 2).flatten(2))
    return block.continuum(hidden_states + mixed)


def ask(asking: Attended, text: Attended, scaling: float) -> tuple[Tensor, Tensor]:
    """What each question reads [N, H, C, D], and its weights of the text's tokens [N, G, H / G, C, T].

    Questions follow the text, and do not see each other.
    """
    questions, _, count, _ = asking.queries.shape
    _, heads, length, width = text.keys.shape
    of_text = (questions, heads, length, width)
    keys = torch.cat([text.keys.expand(of_text), asking.keys], dim=2)
    values = torch.cat([text.values.expand(of_text), asking.values], dim=2)
    is_visible = torch.ones(count, length + count).tril(length).bool()
    grouped = asking.queries.unflatten(1, (heads, -1))
    # a product for each head of keys
    products = grouped.flatten(2, 3) @ keys.mT * scaling
    products = products.unflatten(2, (-1, count))
    products.masked_fill_(~is_visible, -torch.inf)
    weights = products.softmax(-1)
    reads = weights.flatten(2, 3) @ values
    reads = reads.unflatten(2, (-1, count))
    return reads.flatten(1, 2), weights[..., :length]


@torch.no_grad()
def examples_of(source: HopeForCausalLM, text: AskedText, layers: list[int]) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Each layer, its inputs [T', hidden_size] and the interest in them [T', G], in the model with full attention.

    The interest in a token is the highest weight that any token of a question gives it. T' are the tokens that the
    window has passed when questions are asked, without the sinks.
    """
    model = source.model
    config = source.config
    questions = [torch.tensor(ids) for ids in text.questions]
    padded = pad_sequence(questions, batch_first=True, padding_value=-1)
    is_padding = padded < 0
    hidden_states = model.embed_tokens(text.ids)
    asking_states = model.embed_tokens(padded.clamp(min=0))
    length = text.ids.shape[1]
    longest = padded.shape[1]
    positions = torch.arange(length)
    asking_positions = torch.arange(length, length + longest)
    angles = model.rotary_emb(hidden_states, positions[None])
    asking_angles = model.rotary_emb(hidden_states, asking_positions[None])
    # over heads of keys and of queries, and over tokens of the text
    is_padding = is_padding[:, None, None, :, None]
    passed = slice(config.attention_sinks, length - config.sliding_window)
    for index, block in enumerate(model.layers[: max(layers) + 1]):
        attended = project(block, hidden_states, angles)
        asking = project(block, asking_states, asking_angles)
        reads = scaled_dot_product_attention(
            attended.queries, attended.keys, attended.values, is_causal=True, enable_gqa=True
        )
        asking_reads, weights = ask(asking, attended, block.mixer.scaling)
        if index in layers:
            passed_inputs = attended.inputs[0, passed]
            passed_weights = weights[..., passed].masked_fill_(is_padding, 0)
            interest = passed_weights.amax((0, 2, 3))
            yield index, passed_inputs.half(), interest.T
        hidden_states = after(block, hidden_states, reads)
        asking_states = after(block, asking_states, asking_reads)


def learn(scores: Scores, inputs: Tensor, interest: Tensor) -> None:
    """Fit scores to the root of the interest, by cross-entropy."""
    # inputs have a layer's own scale
    scale = inputs[:4096].float().std()
    targets = interest.sqrt()
    optimiser = torch.optim.AdamW(scores.parameters(), lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, LEARNING_RATE, total_steps=STEPS)
    for _ in range(STEPS):
        chosen = torch.randint(len(inputs), (BATCH,))
        logits = scores(inputs[chosen].float() / scale)
        loss = binary_cross_entropy_with_logits(logits, targets[chosen])
        loss.backward()
        optimiser.step()
        schedule.step()
        optimiser.zero_grad()
    with torch.no_grad():
        scores.up.weight /= scale


def learn_layers(
    source: HopeForCausalLM, texts: list[AskedText], layers: list[int], mixers: list[WindowThatKeeps]
) -> Tensor:
    """Fit the scores of the mixers, which stand in these layers; the scores of all passed tokens [N, heads]."""
    inputs = {layer: [] for layer in layers}
    interest = {layer: [] for layer in layers}
    for text in texts:
        for layer, layer_inputs, layer_interest in examples_of(source, text, layers):
            inputs[layer].append(layer_inputs)
            interest[layer].append(layer_interest)
    of_layers = []
    for layer, mixer in zip(layers, mixers, strict=True):
        layer_inputs = torch.cat(inputs.pop(layer))
        layer_interest = torch.cat(interest.pop(layer))
        mixer.scores.requires_grad_(True)
        learn(mixer.scores, layer_inputs, layer_interest)
        with torch.no_grad():
            of_layers.append(mixer.scores(layer_inputs.float()))
    return torch.cat(of_layers, dim=1)


def shared_out(scores: Tensor, texts: int, mean: int) -> list[int]:
    """How many tokens each head keeps, so that heads keep `mean` tokens of a training text.

    A head keeps as many as it has among the highest scores of all heads, from the scores of all texts [N, heads].
    """
    heads = scores.shape[1]
    highest = scores.flatten().topk(texts * mean * heads)
    is_among_them = scores >= highest.values[-1]
    counts = is_among_them.sum(0) / texts
    return counts.round().int().clamp(min=FEWEST).tolist()


def parse(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_test_flags(parser)
    parser.add_argument("--layers", type=int, nargs="+", default=[5, 6, 7, 10, 14, 17, 18, 20, 23, 26])
    parser.add_argument("--texts", type=int, default=12, help="training texts")
    parser.add_argument("--length", type=int, default=4096, help="tokens of a training text")
    parser.add_argument("--kept", type=int, nargs="+", default=[512], help="tokens that a head of keys keeps, a mean")
    parser.add_argument("--random", action="store_true", help="each head keeps as many tokens, but random ones")
    parser.add_argument("--alike", action="store_true", help="each head keeps the same number of tokens")
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> None:
    args = parse(words)
    torch.manual_seed(args.seed)
    source = HopeForCausalLM.from_pretrained(args.model).eval().requires_grad_(False)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    training_text, tests = texts_of(tokenizer, args)
    texts = AskedTexts(tokenizer, training_text, args.length, args.seed)
    training_texts = [texts.make() for _ in range(args.texts)]
    model = with_kinds(source, args.layers, KIND)
    mixers = [model.model.layers[layer].mixer for layer in args.layers]
    scores = learn_layers(source, training_texts, args.layers, mixers)
    heads = source.config.num_key_value_heads
    if args.random:
        for mixer in mixers:
            mixer.scores = RandomScores(heads)
    for mean in args.kept:
        counts = shared_out(scores, args.texts, mean)
        if args.alike:
            counts = [mean] * len(counts)
        for index, mixer in enumerate(mixers):
            first = index * heads
            mixer.kept = counts[first : first + heads]
            print(f"layer {args.layers[index]} keeps {mixer.kept}", flush=True)
        row = measure(model, tokenizer, tests, args.form)
        report("kept", {"kept": mean} | row)


if __name__ == "__main__":
    main()
