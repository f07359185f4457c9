"""The ids of a GGUF's vocabulary are those of the original tokenizer."""

import json
from itertools import pairwise

import pytest
from tokenizers import Tokenizer, pre_tokenizers, trainers
from tokenizers.models import BPE

from hope_hf.convert.gguf_tokenizer import SPACE, Vocabulary

TEXT = "Don't  count\n\n\n  12345 ships,\tnor ÉTÉ's\r\n cafés...  \n"


def fields(**values):
    return {f"tokenizer.ggml.{name}": value for name, value in values.items()}


def byte_level(rule, words=(), **values):
    """The tokenizer of a vocabulary of all bytes, and of words of ASCII letters with the merges that make them."""
    tokens, merges = sorted(pre_tokenizers.ByteLevel.alphabet()), []
    for word in words:
        for end in range(2, len(word) + 1):
            if word[:end] not in tokens:
                tokens.append(word[:end])
                merges.append(f"{word[: end - 1]} {word[end - 1]}")
    values = {"token_type": [1] * len(tokens), "tokens": tokens, "merges": merges} | values
    return Vocabulary(fields(model="gpt2", pre=rule, **values), "FILE").tokenizer(len(values["tokens"]))


def test_digits_stand_alone_in_a_smollm_vocabulary():
    original = Tokenizer(BPE())
    digits = pre_tokenizers.Digits(individual_digits=True)
    original.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|im_start|>", "<|im_end|>"],
    )
    original.train_from_iterator([TEXT, "the ships, the  counts\n\n"] * 9, trainer)
    tokens = sorted(original.get_vocab(), key=original.token_to_id)
    merges = [" ".join(pair) for pair in json.loads(original.to_str())["model"]["merges"]]
    known = dict(tokens=tokens, merges=merges, token_type=[3, 3] + [1] * (len(tokens) - 2), eos_token_id=1)
    made = byte_level("smollm", **known)
    text = f"<|im_start|>{TEXT}<|im_end|>12 345"
    assert made(text)["input_ids"] == original.encode(text).ids
    assert made.decode(made(TEXT)["input_ids"]) == TEXT
    assert byte_level("gpt-2", **known)(text)["input_ids"] != original.encode(text).ids
    # nothing beyond the embeddings
    assert len(made) == len(tokens) and made.eos_token == "<|im_end|>" and made.bos_token is None


BEGIN = ["Don", "'t", " ", " count"]
WORDS = {
    "gpt-2": [*BEGIN, "\n\n\n ", " 12345", " ships", ",", "\t", "nor", " ÉTÉ", "'s", "\r\n",
              " cafés", "...", "  \n"],
    "smollm": [*BEGIN, "\n\n\n  ", "1", "2", "3", "4", "5", " ships", ",", "\t", "nor", " ÉTÉ",
               "'s", "\r\n", " cafés", "...", "  \n"],
    "llama-bpe": [*BEGIN, "\n\n\n", " ", " ", "123", "45", " ships", ",", "\tnor", " ÉTÉ", "'s", "\r\n",
                  " cafés", "...", "  \n"],
    "qwen2": [*BEGIN, "\n\n\n", " ", " ", "1", "2", "3", "4", "5", " ships", ",", "\tnor", " ÉTÉ", "'s",
              "\r\n", " cafés", "...", "  \n"],
    "tekken": [*BEGIN, "\n\n\n", " ", " ", "1", "2", "3", "4", "5", " ships", ",", "\tnor", " ÉTÉ",
               "'s", "\r\n", " cafés", "...", "  \n"],
}  # fmt: skip


@pytest.mark.parametrize("rule", WORDS)
def test_words_of_a_rule(rule):
    split = byte_level(rule).backend_tokenizer.pre_tokenizer.pre_tokenize_str(TEXT)
    assert [TEXT[start:end] for _, (start, end) in split] == WORDS[rule]


def test_a_word_that_is_a_token_is_whole_in_llama_3_and_texts_begin_with_bos():
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "ab", "abc", "<bos>"]
    known = dict(tokens=tokens, merges=["b c"], token_type=[1] * 258 + [3], bos_token_id=258)
    known["tokens"][256] = "bc"
    assert byte_level("llama-bpe", **known)("abc")["input_ids"] == [258, 257]
    assert byte_level("llama-bpe", **known, add_bos_token=False)("abc")["input_ids"] == [257]
    # the merges alone do not reach it
    a = tokens.index("a")
    assert byte_level("qwen2", **known)("abc")["input_ids"] == [a, 256]
    assert byte_level("qwen2", **known, add_eos_token=True, eos_token_id=258)("abc")["input_ids"] == [a, 256, 258]


PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)),
          "he", "th", SPACE + "t", SPACE + "the", "re", "the", SPACE * 2, "er", "there", "ere", SPACE + "there",
          SPACE, "t", "h", "e", "r", "n", "\n"]  # fmt: skip
TYPES = [2, 3, 3, *[6] * 256, *[1] * (len(PIECES) - 259)]
SCORES = [0.0] * 259 + [-float(index) for index in range(len(PIECES) - 259)]


def merged_best_first(text, prefix):
    """SentencePiece's rule: of all neighbours that make a piece, the best are joined, until there are none."""
    symbols = list((SPACE if prefix and text else "") + text.replace(" ", SPACE))
    # the first piece has the best score
    ordinary = PIECES[259:]
    while True:
        joined = [left + right for left, right in pairwise(symbols)]
        known = [piece for piece in joined if piece in ordinary]
        if not known:
            break
        place = joined.index(min(known, key=ordinary.index))
        symbols[place : place + 2] = [joined[place]]
    ids = []
    for symbol in symbols:
        if symbol in ordinary:
            ids.append(PIECES.index(symbol))
        else:
            ids += [3 + byte for byte in symbol.encode()]
    return ids


@pytest.mark.parametrize("prefix", [True, False])
def test_pieces(prefix):
    known = dict(model="llama", tokens=PIECES, scores=SCORES, token_type=TYPES, add_bos_token=False)
    made = Vocabulary(fields(**known, add_space_prefix=prefix), "FILE").tokenizer(len(PIECES))
    for text in ("the", " there", "  the other  there\nhere é", "\n\nthe re", "", "tHé"):
        assert made(text)["input_ids"] == merged_best_first(text, prefix), text
        assert made.decode(made(text)["input_ids"]) == text
    assert len(made) == len(PIECES)
    # BOS is llama.cpp's default for such a vocabulary
    del known["add_bos_token"]
    with_bos = Vocabulary(fields(**known), "FILE").tokenizer(len(PIECES))
    assert with_bos("the")["input_ids"] == [1, *merged_best_first("the", True)]
