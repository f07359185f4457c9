"""The subject of an evaluation: a model with its tokenizer."""

import math
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hope_hf.common.devices import choose_device
from hope_hf.common.models import build_model, is_hope, load_config
from hope_hf.data import check_vocabulary, document_start, load_tokenizer, plain_ids, warn_of_other_tokenizer

from .flags import Arguments
from .result import CannotRun

# Options that `generate` would else take from the model's generation_config.json.
PLAIN = {"num_beams": 1, "repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "min_length": 0}


@dataclass
class Subject:
    """A model in evaluation mode on its device."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase

    @property
    def has_memory(self) -> bool:
        """Whether it is a HOPE with layers of self-modifying memories."""
        return is_hope(self.model.config) and self.model.config.has_memories

    @property
    def learns(self) -> bool:
        """Whether its levels can learn while it reads."""
        return getattr(self.model.config, "level_learning", None) is not None

    @property
    def longest_input(self) -> int | None:
        """Number of positions of a model whose attention sees all tokens; None if the length is not bounded."""
        config = self.model.config
        if is_hope(config):
            return config.longest_text
        is_bounded = not getattr(self.model, "_is_stateful", False)
        return getattr(config, "max_position_embeddings", None) if is_bounded else None

    def require_positions(self, length: int) -> None:
        """Raise ValueError if the model has fewer positions than the longest of `--lengths`."""
        bound = self.longest_input
        if bound is not None and length > bound:
            raise ValueError(
                f"--lengths asks for {length:,} tokens, and the model has {bound:,} positions "
                "(max_position_embeddings): lower it."
            )

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without special tokens: those that it spells are text, as in training."""
        return plain_ids(self.tokenizer, text)

    def continued(self, prompts: torch.Tensor, new_tokens: int) -> list[str]:
        """Greedy continuations of prompts [B, T], with `new_tokens` tokens, or fewer if positions run out."""
        prompts = prompts.to(self.model.device)
        tokens = self.model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=min(new_tokens, (self.longest_input or math.inf) - prompts.shape[1]),
            do_sample=False,
            pad_token_id=self.padding,
            **PLAIN,
        )
        return self.tokenizer.batch_decode(tokens[:, prompts.shape[1] :], skip_special_tokens=True)

    @property
    def padding(self) -> int:
        """The token that fills rows in generation."""
        return self.tokenizer.pad_token_id or self.start

    @property
    def start(self) -> int:
        """The token at the start of every document."""
        return document_start(self.tokenizer)


def load_subject(args: Arguments) -> Subject:
    """The model of `--model_name_or_path` and its tokenizer; ValueError if they do not load or do not match."""
    device = choose_device(args.device)
    config = load_config(args.model_name_or_path, "model_name_or_path", args)
    tokenizer = load_tokenizer(args.tokenizer_name or args.model_name_or_path, args.trust_remote_code)
    check_vocabulary(tokenizer, config.vocab_size)
    if args.tokenizer_name:
        warn_of_other_tokenizer(tokenizer, args.model_name_or_path)
    model = build_model(args, config, getattr(torch, args.dtype))
    return Subject(model.to(device).eval(), tokenizer)


def require_finite(values: torch.Tensor, what: str) -> None:
    """Raise CannotRun if a value is not finite. `what`: suite and values for the message, in the plural."""
    if not values.isfinite().all():
        raise CannotRun(f"{what} are not finite: check its weights or --dtype.")
