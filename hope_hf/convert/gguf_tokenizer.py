"""The vocabulary of a GGUF file as a tokenizer with the ids of the original.

A GGUF has no `tokenizer.json`: it has tokens, merges or scores, and the name of a rule that splits a text into words.
The rules here are those of the original tokenizers. An unknown one is refused, since other words have other ids.
"""

import warnings

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

NORMAL, CONTROL, USER_DEFINED = 1, 3, 4
SPACE = "\u2581"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# `tokenizer.ggml.pre` -> the regular expression of a word; None: GPT-2's; "digits": GPT-2's, each digit alone.
RULES = {
    None: None,
    "default": None,
    "gpt-2": None,
    "mellum": None,
    "smollm": "digits",
    "starcoder": "digits",
    "refact": "digits",
    "codeshell": "digits",
    "minerva-7b": "digits",
    "llama-bpe": LLAMA3,
    "llama3": LLAMA3,
    "llama-v3": LLAMA3,
    "qwen2": QWEN2,
    "deepseek-r1-qwen": QWEN2,
    "tekken": TEKKEN,
}
# A word that is a token is that token, whatever the merges make of it; and texts begin with BOS.
WHOLE_WORDS = (LLAMA3, TEKKEN)
# Fields that change ids, unless they have this value.
NEUTRAL = {
    "tokenizer.ggml.remove_extra_whitespaces": False,
    "tokenizer.ggml.escape_whitespaces": True,
    "tokenizer.ggml.treat_whitespace_as_suffix": False,
    "tokenizer.ggml.add_sep_token": False,
    "tokenizer.ggml.precompiled_charsmap": None,
}
# Names of transformers -> of the file, and the default of llama.cpp for SentencePiece.
SPECIAL = {
    "bos_token": ("bos_token_id", 1),
    "eos_token": ("eos_token_id", 2),
    "unk_token": ("unknown_token_id", 0),
    "pad_token": ("padding_token_id", None),
}


class Vocabulary:
    """The fields `tokenizer.*` of a file.

    Attributes:
        tokens: by id; empty for a file without a vocabulary.
    """

    def __init__(self, metadata: dict, named: str):
        """`metadata`: all fields by name; `named`: how error messages name the file."""
        self._metadata, self._named = metadata, named
        self.tokens: list[str] = self._get("tokens", [])
        self._types: list[int] = self._get("token_type", [NORMAL] * len(self.tokens))
        self._kind = self._get("model")
        self._pre = self._get("pre")
        self._is_pieces = self._kind == "llama"
        for name in ("token_type", "scores"):
            length = len(self._get(name, self.tokens))
            if length != len(self.tokens):
                raise ValueError(f"{named} has {len(self.tokens)} tokens and {length} of tokenizer.ggml.{name}.")

    def is_of(self, tokenizer: PreTrainedTokenizerBase) -> bool:
        """Whether the tokenizer has the same ids for all ordinary tokens."""
        ids = self._ids_of(NORMAL)
        return tokenizer.convert_ids_to_tokens(ids) == [self.tokens[index] for index in ids]

    def tokenizer(self, vocab_size: int) -> PreTrainedTokenizerBase:
        """The tokenizer. ValueError for a rule or a field that is unknown, or more than `vocab_size` tokens."""
        self._check(vocab_size)
        built = self._pieces() if self._is_pieces else self._words()
        # these are found whole in a text, before it is split into words
        for index in self._ids_of(CONTROL):
            built.add_special_tokens([AddedToken(self.tokens[index], normalized=False, special=True)])
        for index in self._ids_of(USER_DEFINED):
            built.add_tokens([AddedToken(self.tokens[index], normalized=False, special=False)])
        special = {}
        for name, (field, default) in SPECIAL.items():
            token = self._special(field, default)
            if token is not None:
                special[name] = token
        self._add_bos_and_eos(built, special)
        return PreTrainedTokenizerFast(
            tokenizer_object=built,
            chat_template=self._templates(),
            clean_up_tokenization_spaces=False,
            **special,
        )

    def _ids_of(self, kind: int) -> list[int]:
        return [index for index, other in enumerate(self._types) if other == kind]

    def _check(self, vocab_size: int) -> None:
        unknown = [name for name, value in NEUTRAL.items() if self._metadata.get(name, value) != value]
        if self._kind not in ("gpt2", "llama"):
            unknown.append("tokenizer.ggml.model")
        elif not self._is_pieces and self._pre not in RULES:
            unknown.append("tokenizer.ggml.pre")
        elif not self._is_pieces and self._get("add_space_prefix", False):
            unknown.append("tokenizer.ggml.add_space_prefix")
        instead = "put the original's tokenizer.json and tokenizer_config.json into the folder of the file."
        if unknown:
            value = self._metadata.get(unknown[0])
            raise ValueError(f"{self._named} has a {unknown[0]} of {value!r}, which is unknown: {instead}")
        if not self._is_pieces and self._pre in (None, "default"):
            warnings.warn(
                f"{self._named} has no tokenizer.ggml.pre, so words are split as GPT-2 does: if the original splits "
                f"otherwise, {instead}",
                stacklevel=2,
            )
        if len(self.tokens) > vocab_size:
            raise ValueError(
                f"{self._named} has {len(self.tokens)} tokens (tokenizer.ggml.tokens), and token_embd.weight has "
                f"{vocab_size} rows."
            )

    def _words(self) -> Tokenizer:
        """Byte-level BPE: words, in them bytes, and merges of these."""
        rule = RULES[self._pre]
        built = Tokenizer(BPE(self._ids(), self._pairs(), ignore_merges=rule in WHOLE_WORDS))
        # GPT-2's own regular expression is built in
        splits = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=rule in (None, "digits"))]
        if rule == "digits":
            splits.insert(0, pre_tokenizers.Digits(individual_digits=True))
        elif rule is not None:
            splits.insert(0, pre_tokenizers.Split(Regex(rule), "isolated"))
        built.pre_tokenizer = pre_tokenizers.Sequence(splits)
        if rule == QWEN2:
            built.normalizer = normalizers.NFC()
        built.decoder = decoders.ByteLevel()
        return built

    def _pieces(self) -> Tokenizer:
        """SentencePiece's BPE: spaces are characters, and of all pairs the one with the best score is merged first."""
        unknown = self._special(*SPECIAL["unk_token"])
        merges = self._pairs() or self._merges()
        built = Tokenizer(BPE(self._ids(), merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
        spaces = normalizers.Replace(" ", SPACE)
        back = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        if self._get("add_space_prefix", True):
            built.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces])
            back.append(decoders.Strip(" ", 1, 0))
        else:
            built.normalizer = spaces
        built.decoder = decoders.Sequence(back)
        return built

    def _ids(self) -> dict[str, int]:
        return {token: index for index, token in enumerate(self.tokens)}

    def _pairs(self) -> list[tuple[str, str]]:
        """The merges of the file."""
        return [tuple(merge.split(" ", 1)) for merge in self._get("merges", [])]

    def _merges(self) -> list[tuple[str, str]]:
        """All pairs that make a token, that of the best score first."""
        known = set(self.tokens)
        scores = self._get("scores")
        merges = []
        for index in sorted(self._ids_of(NORMAL), key=scores.__getitem__, reverse=True):
            token = self.tokens[index]
            for end in range(len(token) - 1, 0, -1):
                left, right = token[:end], token[end:]
                if left in known and right in known:
                    merges.append((left, right))
        return merges

    def _add_bos_and_eos(self, built: Tokenizer, special: dict[str, str]) -> None:
        """Put BOS before and EOS behind every text, where the file asks for it."""
        begins = self._is_pieces or RULES.get(self._pre) in WHOLE_WORDS
        first, second = ["$A"], ["$B"]
        ids = {}
        if "bos_token" in special and self._get("add_bos_token", begins):
            token = special["bos_token"]
            first, second = [token, *first], [token, *second]
            ids[token] = self.tokens.index(token)
        if "eos_token" in special and self._get("add_eos_token", False):
            token = special["eos_token"]
            first, second = [*first, token], [*second, token]
            ids[token] = self.tokens.index(token)
        if ids:
            built.post_processor = processors.TemplateProcessing(
                single=first, pair=first + second, special_tokens=list(ids.items())
            )

    def _special(self, name: str, default: int | None) -> str | None:
        index = self._get(name, default if self._is_pieces else None)
        return self.tokens[index] if index is not None and index < len(self.tokens) else None

    def _templates(self) -> str | dict[str, str] | None:
        """The template of chats, or several by name."""
        main = self._metadata.get("tokenizer.chat_template")
        templates = {"default": main}
        for name, text in self._metadata.items():
            _, is_template, of = name.partition("tokenizer.chat_template.")
            if is_template:
                templates[of] = text
        return templates if main and len(templates) > 1 else main

    def _get(self, name: str, default=None):
        return self._metadata.get(f"tokenizer.ggml.{name}", default)
