"""Corpora that stream: read no further than their limit, once, and what is held out of them is never trained on."""

import shutil

import pytest
from datasets import IterableDataset
from four_corpora import sentence

from hope_hf.data import corpora, documents, train_tokenizer
from hope_hf.data.corpora import held_out_documents, open_corpus
from hope_hf.data.encoding import make_encoder
from hope_hf.data.mixture import Corpus
from hope_hf.data.packing import tokenize
from hope_hf.data.prepare import main

TEXTS = [sentence(0, number) for number in range(5_000)]


@pytest.fixture(autouse=True)
def read(tmp_path, monkeypatch):
    """Numbers of the rows that were fetched from the Hub's only data set."""
    numbers = []

    def rows(part):
        for number in part:
            numbers.append(number)
            yield {"content": TEXTS[number] if number % 10 else " ", "id": number}

    def load_dataset(name, config_name, split, streaming, data_dir=None):
        assert streaming and (name, split) == ("hub/web", "train")
        return IterableDataset.from_generator(rows, gen_kwargs={"part": list(range(len(TEXTS)))})

    monkeypatch.setattr(documents, "load_dataset", load_dataset)
    monkeypatch.setattr(corpora, "_SHUFFLED", 20)
    return numbers


@pytest.fixture(scope="module")
def words():
    return train_tokenizer(TEXTS[:5], 300)


def web(**limits) -> Corpus:
    return Corpus("web", "hub/web", text_column="content", streaming=True, **limits)


def of(documents) -> set[str]:
    return set(documents["text"])


def test_a_stream_is_read_no_further_than_its_tokens_and_once(words, read):
    first = open_corpus(web(max_tokens=20_000), 5, None, 42, words)
    tokens = len(tokenize(first.train, make_encoder(words)))
    assert 20_000 <= tokens < 22_000 and len(read) < 500 and len(first.validation)
    assert first.dropped["blank"] > 10
    read.clear()
    assert of(open_corpus(web(max_tokens=20_000), 5, None, 42, words).train) == of(first.train) and not read
    assert of(open_corpus(web(max_tokens=20_000), 5, None, 43, words).train) != of(first.train) and read


def test_a_stream_is_read_no_further_than_its_documents(words, read):
    found = open_corpus(web(max_documents=100), 5, 3, 42)
    assert len(found.train) == 100 and len(read) < 250 and 1 <= len(found.validation) <= 3


def test_what_is_evaluated_is_never_trained_on(words, read):
    trained = open_corpus(web(max_documents=500), 5, None, 42)
    read.clear()
    held = held_out_documents(web(max_documents=500), 5, 10, 42)
    # The same stream, read as far as ten held-out documents need.
    assert len(held) == 10 and len(read) < 450
    assert of(held) <= of(trained.validation) and not of(held) & of(trained.train)


def test_a_full_cache_is_foreseen(words, tmp_path, monkeypatch, capsys, read):
    words.save_pretrained(tmp_path / "tokenizer")
    mixture = tmp_path / "mix.yaml"
    web = "{dataset_name: hub/web, text_column: content, streaming: true, max_tokens: 17e9}"
    mixture.write_text(f"corpora: {{web: {web}}}")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(100, 95, 100e9))
    flags = ["--tokenizer_name", str(tmp_path / "tokenizer"), "--output_dir", str(tmp_path / "shards")]
    assert main([str(mixture), *flags]) == 2
    # Five bytes of text a token, and two for the shards on the same disk.
    assert "119.0 GB" in capsys.readouterr().err
    assert not read
