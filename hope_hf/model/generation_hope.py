"""`generate` of HOPE models: a text can be continued from a cache with its new tokens alone."""

import copy
from dataclasses import dataclass

import torch
import transformers
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation import BaseStreamer, GenerationConfig, GenerationMixin
from transformers.masking_utils import create_causal_mask
from transformers.tokenization_utils_base import PreTrainedTokenizerBase
from transformers.utils import logging

from .cache_hope import CACHE_NAME, HopeCache, Snapshot, takes_cache
from .calls import check_inputs, check_rows, reads_frozen
from .configuration_hope import HopeConfig
from .documents import boundaries_of, check_mask, check_mask_values, later_begins
from .recall import Passage, join_passages

logger = logging.get_logger(__name__)
# Before 5.21, a prefill in chunks treats a filled cache as empty.
_MAJOR, _MINOR, *_ = transformers.__version__.split(".")
_CHUNKS_FOLLOW_A_CACHE = (int(_MAJOR), int(_MINOR)) >= (5, 21)


@takes_cache
def create_generation_masks(
    config: HopeConfig,
    inputs_embeds: Tensor,
    attention_mask: Tensor | None,
    cache: Cache | None = None,
    position_ids: Tensor | None = None,
    **_,
) -> dict[str, Tensor | None]:
    """Masks of one shape for every generated token: `generate` makes them for caches of fixed shape.

    `columns` [B, T] is the padding mask of `inputs_embeds` [B, T, ...], for mixers with a state; `attention` is
    transformers' mask.
    """
    masks = {}
    if config.keeps_state:
        columns = attention_mask
        if columns is not None:
            columns = columns[:, -inputs_embeds.shape[1] :]
            # copied, since slices of the growing mask have other strides every time, each of another compiled graph
            columns = columns.clone(memory_format=torch.contiguous_format)
        masks["columns"] = columns
    if config.attention_layer is not None:
        masks["attention"] = create_causal_mask(
            config, inputs_embeds, attention_mask, cache, position_ids, layer_idx=config.attention_layer
        )
    return masks


class HopeGenerationMixin(GenerationMixin):
    """`generate` with a cache of R tokens takes the whole text, of more than R tokens, or new tokens alone.

    transformers decides by the mask: with one column for every token of the cache and the input, the input is new;
    with as many columns as the input, or without a mask, it is the whole text. HOPE also compares the text: an input
    that does not begin with the tokens of the cache is new, and its mask gets R more columns. A cache without an
    archive of tokens (switched off, or of embeddings) decides by length: at most R tokens are new.

    `generate` does not read the last token that it returns, so a continuation must begin with that token.
    """

    # `generate` calls it by this name
    create_masks_for_generate = staticmethod(create_generation_masks)

    @takes_cache
    @torch.no_grad()
    def generate(
        self,
        *args,
        cache: Cache | None = None,
        learn: bool = False,
        learn_generated: bool = False,
        freeze_memories: bool | None = None,
        recall: bool = False,
        **kwargs,
    ):
        """As in transformers; levels may learn (`config.level_learning`), and passages may be recalled.

        Args:
            args: see `transformers.GenerationMixin.generate`.
            cache: a `HopeCache`, which is read and updated.
            learn: whether levels learn from the prompt.
            learn_generated: whether they also learn from the new tokens, which are then read once more. What is
                learned is kept in `cache`.
            freeze_memories: as in `forward`.
            recall: whether the passages of what `cache` has read that fit the prompt best (`HopeCache.recall`) are
                read before it. It needs `tokenizer`. Neither the result nor `cache` holds the passages: `cache` reads
                the prompt and the new tokens once more, without them.
            kwargs: see `transformers.GenerationMixin.generate`.
        """
        learns = learn or learn_generated
        if cache is None and learns:
            cache = HopeCache(self.config)
        if cache is not None:
            kwargs[CACHE_NAME] = cache
        # asked here, since a compiled forward pass cannot read the context
        if reads_frozen(self.base_model, freeze_memories):
            kwargs["freeze_memories"] = True
        if recall:
            return self._generate_with_passages(*args, learn=learn, learn_generated=learn_generated, **kwargs)
        if not learns:
            return super().generate(*args, **kwargs)
        prompt = _Prompt(learn)
        output = super().generate(*args, **kwargs, learn=prompt)
        if learn_generated:
            tokens = output if isinstance(output, Tensor) else output.sequences
            self._learn_generated(tokens, prompt, cache, freeze_memories)
        return output

    def _learn_generated(
        self, tokens: Tensor, prompt: "_Prompt", cache: HopeCache, freeze_memories: bool | None
    ) -> None:
        """Read the new tokens of `tokens` [B, prompt and T] again from the prompt's end, and learn from them."""
        if len(tokens) != len(prompt.mask) or prompt.beams > 1:
            raise ValueError("learn_generated=True learns from one continuation of each row: give num_beams=1")
        # `generate` does not read the last token
        tokens = tokens[:, prompt.length : -1]
        if not tokens.shape[1]:
            return
        cache.rollback(prompt.snapshot)
        mask = _extended_mask(prompt.mask, tokens, prompt)
        self._read_again(tokens, mask, cache, True, freeze_memories)

    @takes_cache
    def _generate_with_passages(
        self,
        inputs: Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        *args,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        cache: HopeCache | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        streamer: BaseStreamer | None = None,
        learn: bool = False,
        learn_generated: bool = False,
        freeze_memories: bool | None = None,
        **kwargs,
    ):
        """`generate` after passages, which `cache` has not read at the end; it stays as it was after an error."""
        input_ids = inputs if input_ids is None else input_ids
        _require_recall(cache, tokenizer, input_ids)
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        # a column for every token of the cache and the prompt
        mask = _with_columns_read(attention_mask, input_ids, cache)
        columns_read = int(cache.get_seq_length())
        tokens = input_ids[:, columns_read - mask.shape[1] :]
        mask_of_tokens = mask[:, columns_read:]
        window = self.config.sliding_window
        extended, extended_mask = _behind_passages(tokens, mask_of_tokens, cache, tokenizer, window)
        if streamer is not None:
            streamer = _StreamerOfPrompt(streamer, input_ids)
        more = extended.shape[1] - input_ids.shape[1]
        generation_config, kwargs = self._with_longer_prompt(generation_config, kwargs, more)
        before = cache.snapshot()
        prompt = _Prompt(learn=False)
        try:
            output = super().generate(
                extended,
                generation_config,
                *args,
                attention_mask=torch.cat([mask[:, :columns_read], extended_mask], dim=1),
                tokenizer=tokenizer,
                streamer=streamer,
                freeze_memories=freeze_memories,
                learn=prompt,
                **{CACHE_NAME: cache},
                **kwargs,
            )
            sequences = output if isinstance(output, Tensor) else output.sequences
            generated = sequences[:, prompt.length :]
            cache.rollback(before)
            # several continuations of a prompt have a row each
            repeats = len(generated) // len(tokens)
            if repeats > 1:
                cache.batch_repeat_interleave(repeats)
            tokens = tokens.repeat_interleave(repeats, dim=0)
            mask = mask.repeat_interleave(repeats, dim=0)
            self._read_again(tokens, mask, cache, learn, freeze_memories)
            # `generate` does not read the last token
            new = generated[:, :-1]
            mask = _extended_mask(mask, new, prompt)
            self._read_again(new, mask, cache, learn_generated, freeze_memories)
        except BaseException:
            cache.rollback(before)
            raise
        prompts = input_ids.repeat_interleave(repeats, dim=0)
        sequences = torch.cat([prompts, generated], dim=1)
        if isinstance(output, Tensor):
            return sequences
        output.sequences = sequences
        return output

    def _read_again(
        self, tokens: Tensor, mask: Tensor, cache: HopeCache, learn: bool, freeze_memories: bool | None
    ) -> None:
        """Read tokens [B, T]; `mask` has a column for all that the cache has then read."""
        if tokens.shape[1]:
            options = dict(learn=learn, logits_to_keep=1, freeze_memories=freeze_memories)
            self(tokens, attention_mask=mask, cache=cache, **options)

    def _with_longer_prompt(
        self, generation_config: GenerationConfig | None, kwargs: dict, more: int
    ) -> tuple[GenerationConfig | None, dict]:
        """The arguments of `generate` for a prompt of `more` tokens more, which some lengths count."""
        config = copy.deepcopy(generation_config)
        kwargs = dict(kwargs)
        for name in ("max_length", "min_length"):
            if kwargs.get(name):
                kwargs[name] += more
            elif getattr(config, name, None):
                setattr(config, name, getattr(config, name) + more)
            elif getattr(self.generation_config, name):
                kwargs[name] = getattr(self.generation_config, name) + more
        return config, kwargs

    def _prepare_model_inputs(self, inputs, bos_token_id, model_kwargs):
        inputs, name, model_kwargs = super()._prepare_model_inputs(inputs, bos_token_id, model_kwargs)
        check_inputs(self.config, **{name: inputs})
        mask = model_kwargs.get("attention_mask")
        _require_one_text(mask, model_kwargs)
        if mask is not None:
            model_kwargs["attention_mask"] = _with_columns_read(mask, inputs, model_kwargs.get(CACHE_NAME))
        return inputs, name, model_kwargs

    def _prepare_attention_mask_for_generation(self, inputs_tensor, generation_config, model_kwargs):
        mask = super()._prepare_attention_mask_for_generation(inputs_tensor, generation_config, model_kwargs)
        return _with_columns_read(mask, inputs_tensor, model_kwargs.get(CACHE_NAME))

    def _prepare_cache_for_generation(self, generation_config, model_kwargs, *args):
        has_cache = model_kwargs.get(CACHE_NAME) is not None
        super()._prepare_cache_for_generation(generation_config, model_kwargs, *args)
        if has_cache or generation_config.is_assistant:
            return
        cache = model_kwargs.get(CACHE_NAME)
        # for the caller, who gets it with `return_dict_in_generate` and may save it
        if type(cache) is DynamicCache and not cache.offloading:
            model_kwargs[CACHE_NAME] = HopeCache(self.config)

    def _assisted_decoding(self, *args, learn: "_Prompt | None" = None, **kwargs):
        if learn is not None:
            raise ValueError(
                "learn=True, learn_generated=True and recall=True would read guesses that are rejected: leave "
                "assistant_model and prompt_lookup_num_tokens out"
            )
        return super()._assisted_decoding(*args, **kwargs)

    def _expand_inputs_for_generation(self, expand_size=1, **kwargs):
        cache = kwargs.get(CACHE_NAME)
        inputs = kwargs.get("input_ids")
        # beams and samples of a text go on from its row; a caller may have repeated the rows
        if expand_size > 1 and inputs is not None and getattr(cache, "num_sequences", 0) == len(inputs):
            cache.batch_repeat_interleave(expand_size)
        return super()._expand_inputs_for_generation(expand_size=expand_size, **kwargs)

    def _prefill(self, input_ids, generation_config, model_kwargs, *args, **kwargs):
        prompt = model_kwargs.pop("learn", None)
        if prompt is None:
            return self._prefill_in_chunks(input_ids, generation_config, model_kwargs, *args, **kwargs)
        learning_kwargs = model_kwargs | {"learn": prompt.learn}
        outputs = self._prefill_in_chunks(input_ids, generation_config, learning_kwargs, *args, **kwargs)
        prompt.end(input_ids, generation_config, model_kwargs)
        return outputs

    def _prefill_in_chunks(self, input_ids, generation_config, model_kwargs, *args, **kwargs):
        size = generation_config.prefill_chunk_size
        cache = model_kwargs.get(CACHE_NAME)
        read = 0
        if not (size is None or cache is None or _CHUNKS_FOLLOW_A_CACHE):
            read = int(cache.get_seq_length())
        if not read:
            return super()._prefill(input_ids, generation_config, model_kwargs, *args, **kwargs)
        mask = model_kwargs.get("attention_mask")
        if mask is not None and mask.shape == input_ids.shape:
            # the input is the whole text
            input_ids = input_ids[:, read:]
        at_once = copy.copy(generation_config)
        at_once.prefill_chunk_size = None
        remaining = input_ids.shape[1]
        for chunk in input_ids.split(size, dim=1):
            remaining -= chunk.shape[1]
            chunk_kwargs = dict(model_kwargs)
            for name in ("attention_mask", "position_ids"):
                columns = model_kwargs.get(name)
                if columns is not None:
                    chunk_kwargs[name] = columns[:, : columns.shape[1] - remaining]
            outputs = super()._prefill(chunk, at_once, chunk_kwargs, *args, **kwargs)
        return outputs


@dataclass
class _Prompt:
    """A prompt that levels learn from, and where it ended."""

    learn: bool
    length: int = 0
    # columns read [B, prompt and earlier tokens], 0 for padding
    mask: Tensor | None = None
    beams: int = 1
    # end tokens, and the token that fills rows
    ends: Tensor | None = None
    padding: Tensor | None = None
    snapshot: Snapshot | None = None

    def end(self, input_ids, generation_config, model_kwargs) -> None:
        """Remember the prompt's end; `model_kwargs` are those of the first new token."""
        cache = model_kwargs[CACHE_NAME]
        self.length = input_ids.shape[1]
        self.mask = model_kwargs.get("attention_mask")
        if self.mask is None:
            self.mask = input_ids.new_ones(len(input_ids), int(cache.get_seq_length()))
        self.beams = generation_config.num_beams or 1
        self.ends = generation_config._eos_token_tensor
        self.padding = generation_config._pad_token_tensor
        self.snapshot = cache.snapshot()

    def is_real(self, tokens: Tensor) -> Tensor:
        """Whether each generated token [B, T] is one, and not the padding behind a row's end."""
        ended = torch.zeros_like(tokens)
        if self.ends is not None:
            ended = torch.isin(tokens, self.ends).long()
        real = ended.cumsum(1) - ended == 0
        if self.padding is not None and len(tokens) > 1:
            # another criterion than an end token may have stopped the row
            is_padding = tokens == self.padding
            padding_to_the_end = is_padding.flip(1).cumprod(1).flip(1).bool()
            real &= ~padding_to_the_end | ended.bool()
        return real


def _extended_mask(mask: Tensor, tokens: Tensor, prompt: _Prompt) -> Tensor:
    """A mask of all columns read with those of generated tokens [B, T] behind them."""
    is_real = prompt.is_real(tokens)
    return torch.cat([mask, is_real.to(mask.dtype)], dim=1)


def _require_recall(cache, tokenizer, input_ids) -> None:
    """ValueError if the arguments of `generate` do not allow recall."""
    if not hasattr(cache, "recall"):
        raise ValueError(
            "recall=True reads passages of what a cache has read: give cache=HopeCache(model.config) that has read a "
            f"text, not {'none' if cache is None else type(cache).__name__}"
        )
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise ValueError("recall=True searches for the words of the prompt: give tokenizer=")
    if input_ids is None or input_ids.ndim != 2:
        raise ValueError("recall=True searches for the words of the prompt: give it as input_ids, not as embeddings")
    if cache.get_seq_length():
        check_rows(cache.num_sequences, input_ids)


def _behind_passages(
    tokens: Tensor, mask: Tensor, cache: HopeCache, tokenizer: PreTrainedTokenizerBase, window: int | None
) -> tuple[Tensor, Tensor]:
    """Prompts [B, N] behind the passages that fit them best, padded in front, and their mask.

    Raises:
        ValueError: a prompt and the best passage for it do not fit into the attention's window.
    """
    rows = []
    for row, (tokens_of_row, real) in enumerate(zip(tokens, mask.bool(), strict=True)):
        prompt = tokens_of_row[real]
        question = tokenizer.decode(prompt, skip_special_tokens=True)
        passages = cache.recall(question, tokenizer, row=row)
        ids = _behind(passages, prompt, tokenizer)
        # the best one alone is better than none
        while window is not None and len(passages) > 1 and len(ids) > window:
            passages.pop()
            ids = _behind(passages, prompt, tokenizer)
        rows.append(ids)
    longest = max(map(len, rows))
    if window is not None and longest > window:
        raise ValueError(
            f"the prompt with the passages has {longest} tokens, and the window {window}: the passages would have "
            "left it before the answer, so shorten the prompt, or leave recall out"
        )
    extended = tokens.new_zeros(len(rows), longest)
    extended_mask = mask.new_zeros(len(rows), longest)
    for row, ids in enumerate(rows):
        extended[row, longest - len(ids) :] = ids
        extended_mask[row, longest - len(ids) :] = 1
    return extended, extended_mask


def _behind(passages: list[Passage], prompt: Tensor, tokenizer: PreTrainedTokenizerBase) -> Tensor:
    """A prompt [N] behind passages, in which special tokens that they spell are text."""
    context = tokenizer(join_passages(passages), add_special_tokens=False, split_special_tokens=True)
    return torch.cat([prompt.new_tensor(context["input_ids"]), prompt])


class _StreamerOfPrompt(BaseStreamer):
    """A streamer that gets the prompt [B, T] without the passages before it."""

    def __init__(self, streamer: BaseStreamer, prompt: Tensor):
        self._streamer, self._prompt = streamer, prompt.cpu()
        self._has_begun = False

    def put(self, value: Tensor) -> None:
        """Pass new tokens on; the first value is the prompt."""
        self._streamer.put(value if self._has_begun else self._prompt)
        self._has_begun = True

    def end(self) -> None:
        """Pass the end on."""
        self._streamer.end()


def _require_one_text(mask: Tensor | None, model_kwargs: dict) -> None:
    """ValueError if the mask or other arguments of `generate` mark several documents in a row."""
    markers = list(boundaries_of(model_kwargs))
    position_ids = model_kwargs.get("position_ids")
    if mask is not None and (getattr(mask, "ndim", 4) != 2 or check_mask_values(mask)):
        markers.append("attention_mask")
    elif position_ids is not None:
        real = torch.ones_like(position_ids)
        if mask is not None:
            real = mask[:, -position_ids.shape[1] :]
        if bool(later_begins(real, position_ids).any()):
            markers.append("position_ids")
    if markers:
        raise ValueError(
            f"generate goes on with one text a row, and {' and '.join(markers)} would tell several: give every "
            "document a row of its own, with an attention_mask of 1 for tokens and 0 for padding"
        )


def _with_columns_read(mask: Tensor, inputs: Tensor, cache: Cache | None) -> Tensor:
    """The mask [B, T] of new tokens with a column in front for every token of the cache; other masks unchanged."""
    read = cache.get_seq_length() if isinstance(cache, Cache) else 0
    if not read:
        return mask
    if mask.shape != inputs.shape[:2]:
        check_mask(mask, *inputs.shape[:2], int(read))
        return mask
    if _is_whole_text(inputs, cache, int(read)):
        return mask
    columns_read = mask.new_ones(len(mask), int(read))
    return torch.cat([columns_read, mask], dim=1)


def _is_whole_text(inputs: Tensor, cache: Cache, read: int) -> bool:
    """Whether the inputs [B, T] (or embeddings [B, T, hidden_size]) contain the `read` tokens of the cache."""
    length = inputs.shape[1]
    if inputs.ndim == 3:
        if length <= read:
            raise ValueError(
                f"inputs_embeds holds {length} tokens, and the cache has read {read}: give the embeddings of "
                "the whole text, or new tokens alone as input_ids"
            )
        return True
    if length < read:
        return False
    archive = getattr(cache, "archive", None)
    if archive is None or not archive.holds_tokens:
        return length > read
    begins = archive.is_begin_of(inputs)
    if length == read:
        if begins:
            raise ValueError(
                f"the input is the {read} tokens that the cache has read, and nothing follows them: give the "
                f"tokens that follow, or, to read these again, an attention_mask of {2 * read} columns"
            )
        return False
    if not begins:
        logger.warning_once(
            f"The input of {length} tokens does not begin with the {read} that the cache has read: all of it is "
            "read as new. To say that it is, give an attention_mask with a column for every token read and given."
        )
    return begins


__all__ = ["HopeGenerationMixin"]
