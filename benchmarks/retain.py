"""Do layers with a window answer what it has passed, if they keep the tokens that will be asked for?

Results: docs/log/linearise.md. Each head of keys keeps so many of the tokens that left the window: those with the
highest scores, which a small map of the layer's input gives. It learns from the source with full attention how much
the most interested later query attends to a token that its window has passed. No gradient passes through the model.

The state of this program grows with the text, and hides what was not kept: its results are those of a state of fixed
size. It takes one row without padding.

Axes: B row, T token, G head of keys, H head of queries, D head width.
"""

import argparse
import heapq
from collections.abc import Iterator
from typing import NamedTuple

import torch
from linearise import Contexts, add_test_flags, measure, report, texts_of, with_kinds
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, gelu, scaled_dot_product_attention
from transformers import AutoTokenizer
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from hope_hf import HopeForCausalLM
from hope_hf.model.mixers import register
from hope_hf.model.window_attention import HopeWindowAttention

KIND = "window_that_keeps"
# width of the map that scores tokens
HIDDEN = 64
# queries whose weights are computed together
BAND = 128
# tokens of a training text whose later queries are too few to tell whether they are asked for
LAST = 768
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


class KeepingState(NamedTuple):
    """Keys after rotation and values [1, G, T, D], and scores [1, G, T], of all tokens."""

    keys: Tensor
    values: Tensor
    scores: Tensor


class WindowThatKeeps(HopeWindowAttention):
    """Attention to the window, the sinks and the kept tokens, all at their distances."""

    state_class = KeepingState
    # tokens that a head keeps
    kept = 0

    def __init__(self, config, layer_idx: int):
        super().__init__(config, layer_idx)
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
        lowest = torch.stack([self._lowest_kept(row, count) for row in scores])
        is_kept = scores[:, None] >= lowest[..., None]
        return (is_near | is_kept) & (distance >= 0)

    def _lowest_kept(self, scores: Tensor, count: int) -> Tensor:
        """Score of the worst token that a head keeps, at each of the last `count` queries; -inf while it keeps all."""
        first_query = len(scores) - count
        # tokens before it have left at earlier queries
        begin = max(self.config.attention_sinks, first_query - self.config.sliding_window)
        left_before = scores[self.config.attention_sinks : begin]
        best = left_before.topk(min(self.kept, len(left_before))).values.tolist()
        heapq.heapify(best)
        lowest = torch.full((count,), -torch.inf)
        for index in range(count):
            leaving = first_query + index - self.config.sliding_window
            if leaving >= begin:
                heapq.heappush(best, float(scores[leaving]))
            if len(best) > self.kept:
                heapq.heappop(best)
            if len(best) == self.kept:
                lowest[index] = best[0]
        return lowest

    @staticmethod
    def check_state(*_) -> None:
        """The state is this program's own."""


register(KIND, WindowThatKeeps)


def interest(queries: Tensor, keys: Tensor, window: int) -> Tensor:
    """The highest weight [G, T] that a query gives a token which its window has passed.

    Queries, scaled, are [H, T, D] and keys [G, T, D], after rotation.
    """
    heads, length, width = keys.shape
    grouped = queries.unflatten(0, (heads, -1))
    highest = torch.zeros(heads, length)
    for start in range(window, length, BAND):
        stop = min(start + BAND, length)
        query = torch.arange(start, stop)[:, None]
        token = torch.arange(stop)
        asking = grouped[:, :, start:stop]
        products = asking @ keys[:, None, :stop].transpose(-1, -2)
        is_later = token > query
        weights = products.masked_fill(is_later, -torch.inf).softmax(-1)
        is_far = query - token >= window
        of_far = weights * is_far
        highest[:, :stop] = torch.maximum(highest[:, :stop], of_far.amax((1, 2)))
    return highest


@torch.no_grad()
def examples_of(source: HopeForCausalLM, ids: Tensor, layers: list[int]) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Each layer, its inputs [T', hidden_size] and the interest in them [T', G], in the model with full attention."""
    model = source.model
    config = source.config
    hidden_states = model.embed_tokens(ids)
    length = ids.shape[1]
    angles = model.rotary_emb(hidden_states, torch.arange(length)[None])
    usable = slice(config.attention_sinks, length - LAST)
    for index, block in enumerate(model.layers[: max(layers) + 1]):
        inputs = block.input_layernorm(hidden_states)
        queries, keys, values = block.mixer.project(inputs)
        queries, keys = apply_rotary_pos_emb(queries, keys, *angles)
        reads = scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)
        by_token = reads.transpose(1, 2)
        if index in layers:
            scaled = queries[0] * block.mixer.scaling
            highest = interest(scaled, keys[0], config.sliding_window)
            yield index, inputs[0, usable].half(), highest[:, usable].T
        hidden_states = block.continuum(hidden_states + block.mixer.o_proj(by_token.flatten(2)))


def learn(scores: Scores, inputs: Tensor, highest: Tensor) -> None:
    """Fit scores to the root of the interest, by cross-entropy."""
    # inputs have a layer's own scale
    scale = inputs[:4096].float().std()
    targets = highest.sqrt()
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


def parse(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_test_flags(parser)
    parser.add_argument("--layers", type=int, nargs="+", default=[5, 6, 7, 10, 14, 17, 18, 20, 23, 26])
    parser.add_argument("--contexts", type=int, default=18, help="training texts")
    parser.add_argument("--context", type=int, default=4096, help="tokens of a training text")
    parser.add_argument("--kept", type=int, nargs="+", default=[512], help="tokens that each head of keys keeps")
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> None:
    args = parse(words)
    torch.manual_seed(args.seed)
    source = HopeForCausalLM.from_pretrained(args.model).eval().requires_grad_(False)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    training_text, tests = texts_of(tokenizer, args)
    contexts = Contexts(tokenizer, training_text, args.context, args.seed)
    inputs = {layer: [] for layer in args.layers}
    highest = {layer: [] for layer in args.layers}
    for _ in range(args.contexts):
        for layer, layer_inputs, layer_highest in examples_of(source, contexts.make().ids, args.layers):
            inputs[layer].append(layer_inputs)
            highest[layer].append(layer_highest)
    model = with_kinds(source, args.layers, KIND)
    mixers = [model.model.layers[layer].mixer for layer in args.layers]
    for layer, mixer in zip(args.layers, mixers, strict=True):
        mixer.scores.requires_grad_(True)
        learn(mixer.scores, torch.cat(inputs[layer]), torch.cat(highest[layer]))
    for kept in args.kept:
        for mixer in mixers:
            mixer.kept = kept
        report("kept", {"kept": kept} | measure(model, tokenizer, tests, args.form))


if __name__ == "__main__":
    main()
