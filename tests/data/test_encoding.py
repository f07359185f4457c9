"""Encoding: long texts, encoded in windows, have the tokens of the whole, and bounded memory."""

import random
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from hope_hf.data import encoding
from hope_hf.data.encoding import document_start, make_encoder
from hope_hf.data.vocabulary import train_tokenizer

TEXT = Path(encoding.__file__).read_text() + "Ünïcode 🐍🐈 日本語の文章。 \n\n\n  tabs\t\tand spaces    \r\n" * 9
SPECIAL = ["</s>", "<unk>"]


def trained(model, trainer, pre_tokenizer=None, normalizer=None) -> Tokenizer:
    backend = Tokenizer(model)
    if pre_tokenizer is not None:
        backend.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.train_from_iterator([TEXT], trainer)
    return backend


def bpe(**options):
    return trainers.BpeTrainer(vocab_size=500, special_tokens=SPECIAL, show_progress=False, **options)


KINDS = {
    "ours": lambda: train_tokenizer([TEXT], 500).backend_tokenizer,
    # As Llama 3 and Qwen.
    "another pattern": lambda: trained(
        models.BPE(),
        bpe(initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet())),
        pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(r"\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+"), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        ),
    ),
    # As Llama 2: no words at all, a mark before the text.
    "marks": lambda: trained(
        models.BPE(unk_token="<unk>", byte_fallback=True),
        bpe(max_token_length=9),
        normalizer=normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
    ),
    # As T5.
    "unigram": lambda: trained(
        models.Unigram(),
        trainers.UnigramTrainer(vocab_size=300, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False),
        pre_tokenizers.Metaspace(),
        normalizers.NFKC(),
    ),
    # As BERT.
    "pieces": lambda: trained(
        models.WordPiece(unk_token="<unk>"),
        trainers.WordPieceTrainer(vocab_size=500, special_tokens=SPECIAL, show_progress=False),
        pre_tokenizers.BertPreTokenizer(),
        normalizers.BertNormalizer(),
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_long_text_has_the_tokens_of_the_whole(monkeypatch, kind):
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=KINDS[kind](), eos_token="</s>", unk_token="<unk>")
    rng = random.Random(0)
    texts = ["".join(rng.sample(TEXT.splitlines(keepends=True), 60)) for _ in range(12)]
    whole = make_encoder(tokenizer)(["short", *texts])
    monkeypatch.setattr(encoding, "WINDOW", 300)
    monkeypatch.setattr(encoding, "MARGIN", 200)
    assert min(map(len, texts)) > 1_000
    assert make_encoder(tokenizer)(["short", *texts]) == whole


def test_a_text_without_spaces_loses_nothing_and_is_warned_of(monkeypatch):
    monkeypatch.setattr(encoding, "WINDOW", 301)
    monkeypatch.setattr(encoding, "MARGIN", 80)
    # Tokens of 16 letters: whatever the first one, the windows' tokens begin at other places.
    tokenizer = train_tokenizer(["a" * 999], 262)
    with pytest.warns(UserWarning, match="more than 80 characters without the end of a word"):
        (ids,) = make_encoder(tokenizer)(["a" * 2_000])
    assert tokenizer.decode(ids[1:]) == "a" * 2_000


def with_template(template: str, bos: str = "<s>") -> PreTrainedTokenizerFast:
    backend = trained(
        models.BPE(), bpe(initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet())), pre_tokenizers.ByteLevel()
    )
    special = list(dict.fromkeys([bos, "<s>", "</s>"]))
    backend.add_special_tokens(special)
    backend.decoder = decoders.ByteLevel()
    ids = [(token, backend.token_to_id(token)) for token in special]
    backend.post_processor = processors.TemplateProcessing(single=template, special_tokens=ids)
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=bos, eos_token="</s>")


@pytest.mark.parametrize(
    "template, begin, end",
    [
        ("$A", ["</s>"], []),
        ("$A </s>", ["</s>"], []),
        ("</s> $A", ["</s>"], []),
        ("<s> $A", ["<s>"], ["</s>"]),
        ("<s> $A </s>", ["<s>"], ["</s>"]),
    ],
)
def test_documents_begin_as_the_tokenizer_begins_a_prompt(template, begin, end):
    tokenizer = with_template(template)
    prompt = tokenizer("from bisect", add_special_tokens=False)["input_ids"]
    (ids,) = make_encoder(tokenizer)(["from bisect"])
    assert ids == [*tokenizer.convert_tokens_to_ids(begin), *prompt, *tokenizer.convert_tokens_to_ids(end)]
    assert document_start(tokenizer) == ids[0]
    if begin == template.split()[:1]:
        assert tokenizer("from bisect")["input_ids"][: 1 + len(prompt)] == ids[: 1 + len(prompt)]


def test_several_tokens_before_a_prompt_are_warned_of():
    with pytest.warns(UserWarning, match="begins prompts with <s> </s>, and documents begin with its EOS token </s>"):
        assert document_start(tokenizer := with_template("<s> </s> $A")) == tokenizer.eos_token_id
