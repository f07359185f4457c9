"""Which tokens of a text questions attend to, in each layer of a model that reads it with full attention.

Axes: B row, T token, H head of queries, G head of keys, D head width; N question, C token of a question.
"""

from collections.abc import Collection, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.utils.rnn import pad_sequence
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from hope_hf import HopeForCausalLM

from .texts import AskedText

# of the weights of attention to the text that is left without its passed tokens
_LEAST_WEIGHT = 1e-4


class Attended(NamedTuple):
    """Inputs of attention [B, T, hidden_size]; queries [B, H, T, D], keys and values [B, G, T, D] after rotation."""

    inputs: Tensor
    queries: Tensor
    keys: Tensor
    values: Tensor


class LayerReading(NamedTuple):
    """What a layer reads of a text and of questions after it; T' are the tokens that the window has passed then."""

    layer: int
    # of attention [T', hidden_size]
    inputs: Tensor
    # the highest weight that any token of any question gives a token [T', G]
    interest: Tensor
    # share of what questions read that comes from these tokens, as squared norms in the residual stream
    lacking: float


@torch.no_grad()
def read_with_full_attention(
    model: HopeForCausalLM, text: AskedText, layers: Collection[int]
) -> Iterator[LayerReading]:
    """What these layers read, one after the other, if all layers of a model attend to the whole text.

    Questions are asked behind the text, and do not see each other. `model` has layers of softmax attention alone.
    """
    config = model.config
    trunk = model.model
    device = trunk.embed_tokens.weight.device
    questions = list(map(torch.tensor, text.questions))
    padded = pad_sequence(questions, batch_first=True, padding_value=-1).to(device)
    is_token = padded >= 0
    states = trunk.embed_tokens(text.ids.to(device))
    asking_states = trunk.embed_tokens(padded.clamp(min=0))
    length = states.shape[1]
    positions = torch.arange(length + padded.shape[1], device=device)
    positions = positions.unsqueeze(0)
    angles = trunk.rotary_emb(states, positions[:, :length])
    asking_angles = trunk.rotary_emb(states, positions[:, length:])
    first = config.attention_sinks
    window_begins = max(first, length - config.sliding_window)
    passed = slice(first, window_begins)
    for index, block in enumerate(trunk.layers[: max(layers) + 1]):
        attended = _project(block, states, angles)
        asking = _project(block, asking_states, asking_angles)
        reads = scaled_dot_product_attention(
            attended.queries, attended.keys, attended.values, is_causal=True, enable_gqa=True
        )
        asking_reads, weights = _ask(asking, attended, block.mixer.scaling)
        if index in layers:
            passed_weights = weights[..., passed]
            without = _without(asking_reads, passed_weights, attended, passed)
            yield LayerReading(
                layer=index,
                inputs=attended.inputs[0, passed],
                interest=_interest(passed_weights, is_token),
                lacking=_lacking(block, asking_reads, without, is_token),
            )
        states = _after(block, states, reads)
        asking_states = _after(block, asking_states, asking_reads)


def _interest(weights: Tensor, is_token: Tensor) -> Tensor:
    """The highest weight that any token [N, C] of questions gives [T', G], of weights [G, N, H / G, C, T']."""
    highest_of_group = weights.amax(2)
    highest = (highest_of_group * is_token[..., None]).amax((1, 2))
    return highest.T


def _project(block, hidden_states: Tensor, angles: tuple[Tensor, Tensor]) -> Attended:
    """What a block's attention works with, of [B, T, hidden_size]."""
    inputs = block.input_layernorm(hidden_states)
    queries, keys, values = block.mixer.project(inputs)
    queries, keys = apply_rotary_pos_emb(queries, keys, *angles)
    return Attended(inputs, queries, keys, values)


def _mixed(block, reads: Tensor) -> Tensor:
    """What attention adds to the residual stream [B, T, hidden_size], from what its heads have read [B, H, T, D]."""
    by_token = reads.transpose(1, 2)
    return block.mixer.o_proj(by_token.flatten(2))


def _after(block, hidden_states: Tensor, reads: Tensor) -> Tensor:
    """The block's output [B, T, hidden_size], from what its heads have read [B, H, T, D]."""
    return block.continuum(hidden_states + _mixed(block, reads))


def _ask(asking: Attended, text: Attended, scaling: float) -> tuple[Tensor, Tensor]:
    """What each question reads [N, H, C, D], and its weights of the text's tokens [G, N, H / G, C, T]."""
    queries = _by_key_head(asking.queries, text) * scaling
    question_keys = asking.keys.transpose(0, 1)
    question_values = asking.values.transpose(0, 1)
    text_scores = _scores_of_text(queries, text.keys[0])
    question_scores = _scores_of_questions(queries, question_keys)
    scores = torch.cat([text_scores, question_scores], dim=-1)
    weights = scores.softmax(-1, dtype=torch.float32)
    length = text.keys.shape[2]
    text_weights, question_weights = weights.tensor_split([length], dim=-1)
    text_reads = _read(text_weights, text.values[0])
    question_weights = question_weights.to(question_values.dtype)
    question_reads = question_weights.flatten(2, 3) @ question_values
    reads = text_reads + question_reads.view_as(text_reads)
    return _by_query_head(reads), text_weights


def _scores_of_text(queries: Tensor, keys: Tensor) -> Tensor:
    """Products [G, N, H / G, C, T] of queries [G, N, H / G, C, D] with the keys of the text [G, T, D]."""
    # all questions in a product: the text's keys are many
    scores = queries.flatten(1, 3) @ keys.mT
    return scores.unflatten(1, queries.shape[1:4])


def _scores_of_questions(queries: Tensor, keys: Tensor) -> Tensor:
    """Products [G, N, H / G, C, C] with the keys of each question [G, N, C, D]; -inf for its later tokens."""
    count = queries.shape[3]
    scores = queries.flatten(2, 3) @ keys.mT
    scores = scores.unflatten(2, (-1, count))
    is_later = torch.ones(count, count, device=queries.device).triu(1).bool()
    return scores.masked_fill(is_later, -torch.inf)


def _by_key_head(heads: Tensor, text: Attended) -> Tensor:
    """[N, H, C, D] -> [G, N, H / G, C, D]."""
    key_heads = text.keys.shape[1]
    return heads.unflatten(1, (key_heads, -1)).transpose(0, 1)


def _by_query_head(heads: Tensor) -> Tensor:
    """[G, N, H / G, C, D] -> [N, H, C, D]."""
    return heads.transpose(0, 1).flatten(1, 2)


def _read(weights: Tensor, values: Tensor) -> Tensor:
    """Sums [G, N, H / G, C, D] of values [G, T, D] by weights [G, N, H / G, C, T]."""
    reads = weights.flatten(1, 3).to(values.dtype) @ values
    return reads.unflatten(1, weights.shape[1:4])


def _without(reads: Tensor, weights: Tensor, text: Attended, tokens: slice) -> Tensor:
    """What questions would read without some tokens of the text [N, H, C, D].

    Args:
        reads: what they read with them [N, H, C, D].
        weights: of these tokens [G, N, H / G, C, T'].
    """
    from_tokens = _read(weights, text.values[0, :, tokens])
    from_others = _by_key_head(reads, text) - from_tokens
    weight_of_others = 1 - weights.sum(-1, keepdim=True)
    without = from_others / weight_of_others.clamp(min=_LEAST_WEIGHT)
    return _by_query_head(without).to(reads.dtype)


def _lacking(block, reads: Tensor, without: Tensor, is_token: Tensor) -> float:
    """Squared norm of what is missing in `without` over that of all that is read, of tokens [N, C] of questions."""
    mixed = _mixed(block, reads)
    missing = _mixed(block, reads - without)
    norm = mixed[is_token].float().norm()
    norm_of_missing = missing[is_token].float().norm()
    share = norm_of_missing / norm
    return share.item() ** 2
