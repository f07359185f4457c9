"""Is the written model exact? It and its source read a text and go on with it, in float32.

Each linear map is read from its file when it is called, so that neither model is held in memory.
"""

import logging
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import dispatch_model, init_empty_weights
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from hope_hf import CACHE_NAME, HopeConfig

from .weights import HEAD, TABLE, read_names

# The largest difference of two logits. Where levels side by side or windows add up in another order, it is relative to
# the largest logit.
TOLERANCE = 1e-5
TOKENS, NEW_TOKENS = 256, 20
# Tokens whose logits are compared at once.
PIECE = 128
TEXT = """\
The harbour master kept two books. In the first he wrote the name of every ship, the hour at which it came in and what
it carried: 340 barrels of salt, 12 crates of glass, one piano for the hotel on the hill. In the second he wrote what
he thought of the captains, and that book he showed to nobody. "A man who counts his ropes twice," he said to his
daughter when she asked, "will bring his ship home in November. I only write down who counts." She laughed and began a
third book, in which she wrote what the captains thought of him. Years later, when the harbour had silted up and the
hotel was a school, a student found all three of them in a chest below the stairs, wrapped in sailcloth, and spent a
winter laying their pages side by side. The ships agreed in every line. About the people, the books agreed only once:
on the 3rd of March, in three different hands, each of them said that the fog had been beautiful.
def total(rows): return sum(price * count for price, count in rows)  # 0.5 * 4 + 1.25 * 8 = 12.0
"""


class CheckFailed(RuntimeError):
    """The written model is not exact: one sentence for the user."""


@dataclass(frozen=True)
class Agreement:
    """How the two models compare.

    Attributes:
        tokens: number of tokens of the text.
        difference: largest difference of two logits, left-padded rows included.
        tolerance: the largest that is accepted.
        new_tokens: greedy tokens after the text, which are the same.
    """

    tokens: int
    difference: float
    tolerance: float
    new_tokens: int


@torch.no_grad()
def check(
    source: PreTrainedConfig,
    source_files: list[Path],
    config: HopeConfig,
    folder: Path,
    tokenizer: PreTrainedTokenizerBase | None,
    longest: int | None,
) -> Agreement:
    """Compare the model in `folder` with its source, in which layers of memories add nothing.

    Args:
        source: configuration of the source.
        source_files: its safetensors.
        config: of the written model.
        tokenizer: of the text; without one, the ids are random.
        longest: the most tokens at which the two must agree.

    Raises:
        CheckFailed: they differ.
    """
    theirs = _from_files(source, source_files)
    for layer, kind in enumerate(config.layer_types):
        if kind == "hope_memory":
            theirs.model.layers[layer].self_attn.register_forward_hook(_add_nothing)
    ours = _from_files(config, sorted(folder.glob("*.safetensors")))
    length = TOKENS if longest is None else max(1, min(TOKENS, longest - NEW_TOKENS))
    ids = _text(tokenizer, config)[:, :length]
    difference, largest, same_tokens = _compare_logits(theirs, ours, *_with_padding(ids, config.pad_token_id))
    adds_in_same_order = len(config.level_periods) == 1 and "window_attention" not in config.layer_types
    tolerance = TOLERANCE if adds_in_same_order else TOLERANCE * max(1.0, largest)
    # NaN must fail, too
    if not difference <= tolerance:
        raise CheckFailed(
            f"The converted model's logits differ by up to {difference:.1e} from those of its source, and at most "
            f"{tolerance:.1e} is accepted."
        )
    if not same_tokens:
        raise CheckFailed("The converted model's most likely tokens differ from those of its source.")
    if not torch.equal(_greedy(theirs, ids), _greedy(ours, ids)):
        raise CheckFailed(f"The converted model's {NEW_TOKENS} greedy tokens differ from those of its source.")
    return Agreement(ids.shape[1], difference, tolerance, NEW_TOKENS)


def _with_padding(ids: Tensor, pad_token_id: int | None) -> tuple[Tensor, Tensor]:
    """Two rows of ids [2, T] and their mask: the text [1, T], and its first half behind padding."""
    half = ids.shape[1] // 2
    batch = ids.repeat(2, 1)
    mask = torch.ones_like(batch)
    batch[1] = ids[0].roll(half)
    # some old configurations have -1
    batch[1, :half] = max(0, pad_token_id or 0)
    mask[1, :half] = 0
    return batch, mask


def _compare_logits(
    theirs: PreTrainedModel, ours: PreTrainedModel, ids: Tensor, mask: Tensor
) -> tuple[float, float, bool]:
    """Largest difference of two logits, largest logit, and whether the most likely tokens are the same.

    Args:
        ids, mask: [B, T], with 0 in the mask for padding.
    """
    is_token = mask.bool()
    expected_states = theirs.model(ids, attention_mask=mask, use_cache=False).last_hidden_state[is_token]
    states = ours.model(ids, attention_mask=mask, use_cache=False).last_hidden_state[is_token]
    differences = []
    largest = 0.0
    same_tokens = True
    # the logits of a whole text may be larger than a file of weights
    for start in range(0, len(states), PIECE):
        expected = theirs.lm_head(expected_states[start : start + PIECE])
        logits = ours.lm_head(states[start : start + PIECE])
        differences.append((logits - expected).abs().max())
        largest = max(largest, expected.abs().max().item())
        same_tokens = same_tokens and torch.equal(logits.argmax(-1), expected.argmax(-1))
        del expected, logits
    return torch.stack(differences).max().item(), largest, same_tokens


def _from_files(config: PreTrainedConfig, files: list[Path]) -> PreTrainedModel:
    """The model in float32, which reads the weights of a linear map when it is called and drops them afterwards."""
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    names = read_names(files)
    tied = {HEAD: TABLE, TABLE: HEAD} if config.tie_word_embeddings else {}
    index = {}
    for name in model.state_dict():
        saved = name if name in names else tied[name]
        index[name] = {"safetensors_file": str(names[saved]), "weight_name": saved, "dtype": "float32"}
    # it warns that the weights lie on disk
    logging.getLogger("accelerate.big_modeling").setLevel(logging.ERROR)
    return dispatch_model(model.eval(), {"": "disk"}, main_device="cpu", offload_index=index)


def _add_nothing(module, inputs, outputs):
    return torch.zeros_like(outputs[0]), *outputs[1:]


def _text(tokenizer: PreTrainedTokenizerBase | None, config: HopeConfig) -> Tensor:
    """Token ids [1, T]."""
    if tokenizer is not None:
        ids = tokenizer(TEXT, return_tensors="pt")["input_ids"]
        # a tokenizer may have more entries than the model, and then it is another model's
        if ids.shape[1] > 1 and ids.max() < config.vocab_size:
            return ids
    return torch.randint(config.vocab_size, (1, TOKENS), generator=torch.Generator().manual_seed(0))


def _greedy(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """The ids [NEW_TOKENS] of the most likely tokens after the text; special tokens do not end it."""
    output = model(ids, use_cache=True, logits_to_keep=1)
    tokens = []
    for _ in range(NEW_TOKENS):
        token = output.logits[:, -1:].argmax(-1)
        tokens.append(token)
        output = model(token, use_cache=True, **{CACHE_NAME: output[CACHE_NAME]})
    return torch.cat(tokens, dim=1)[0]
