"""Encoding word by word: the ids of the tokenizers library, for every text in ASCII."""

import random
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

from hope_hf.data import encoding, word_encoding
from hope_hf.data.encoding import make_encoder
from hope_hf.data.vocabulary import END_OF_TEXT, train_tokenizer
from hope_hf.data.word_encoding import WordEncoder, cuts_words_of_gpt2

CODE = Path(encoding.__file__).read_text(encoding="utf-8")
ASCII = [chr(number) for number in range(128)]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([CODE], 400)


def texts() -> list[str]:
    rng = random.Random(0)
    signs = ["".join(rng.choices(ASCII, k=rng.randrange(1, 60))) for _ in range(2000)]
    blanks = ["".join(rng.choices(" \t\n\r\f\v\x1c\x1f\x00aA1'", k=rng.randrange(1, 20))) for _ in range(2000)]
    ends = ["it's we'll I'd'd ''s 's'", f"a{END_OF_TEXT}b {END_OF_TEXT}", " ", "\n\n a", "a  \n", "\x1c\x1d \x1e"]
    return [CODE, *signs, *blanks, *ends]


def test_every_text_has_the_ids_of_the_library(tokenizer, monkeypatch):
    backend = tokenizer.backend_tokenizer
    backend.encode_special_tokens = True
    monkeypatch.setattr(word_encoding, "MOST_WORDS", 1000)
    encoder = WordEncoder(backend)
    for text in texts():
        assert encoder.encode(text) == backend.encode(text, add_special_tokens=False).ids, repr(text)
        assert len(encoder._ids) <= 1000 + len(text)


@pytest.mark.parametrize("cores", [0, 10**6], ids=["library", "words"])
def test_a_corpus_is_encoded_the_same_way_on_few_and_many_cores(tokenizer, monkeypatch, cores):
    monkeypatch.setattr(word_encoding, "FEW_CORES", cores)
    corpus = ["x = 1", "größer 🐍 x", "", CODE, "y's  \n" * 99]
    monkeypatch.setattr(encoding, "WINDOW", 500)
    monkeypatch.setattr(encoding, "MARGIN", 200)
    rows = make_encoder(tokenizer)(corpus)
    plain = [encoding.plain_ids(tokenizer, text) for text in corpus if text]
    assert [row[1:] for row in rows] == plain


def test_other_words_are_left_to_the_library(tokenizer):
    assert cuts_words_of_gpt2(tokenizer.backend_tokenizer)
    copies = [Tokenizer.from_str(tokenizer.backend_tokenizer.to_str()) for _ in range(6)]
    copies[0].pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    copies[1].pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    copies[2].pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(r"\d"), "isolated")])
    copies[3].normalizer = normalizers.Lowercase()
    copies[4].add_tokens(["def "])
    copies[5].model = models.BPE(dropout=0.1)
    assert not any(map(cuts_words_of_gpt2, [*copies, Tokenizer(models.Unigram())]))
