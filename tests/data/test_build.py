"""build_data: from a configuration to batches, on a corpus of a few sentences."""

import json
import os
from itertools import islice
from pathlib import Path

import pytest
import torch

from hope_hf.data import DataConfig, build_data, load_tokenizer, save_tokenizer, train_tokenizer
from hope_hf.data.packing import IGNORED
from hope_hf.data.text_facts import text_facts

TEXTS = [
    f"Document {index} tells of naïve £{index * 37} cats, dogs and numbers. " * (1 + index % 7) for index in range(80)
]


@pytest.fixture(scope="module")
def tokenizer_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(train_tokenizer(TEXTS, 300), folder)
    return str(folder)


@pytest.fixture
def config(tmp_path, tokenizer_dir):
    file = tmp_path / "texts.jsonl"
    file.write_text("\n".join(json.dumps({"text": text}) for text in TEXTS))

    def make(**changes):
        defaults = {"train_file": str(file), "tokenizer_name": tokenizer_dir, "block_size": 32}
        return DataConfig(**defaults | {"per_device_train_batch_size": 4, "validation_split_percentage": 20} | changes)

    return make


def test_training_and_validation_tokens_are_those_of_the_documents(config):
    data = build_data(config())
    tokens_in_an_epoch = data.train.batches_per_epoch * 4 * 32
    assert tokens_in_an_epoch <= data.train_tokens < tokens_in_an_epoch + 4 * 32
    held = [batch["labels"][batch["labels"] != IGNORED] for batch in data.validation]
    first, *texts = data.tokenizer.decode(torch.cat(held)).split("<|endoftext|>")
    assert first == "" and set(texts) < set(TEXTS)


def test_bytes_per_token_counts_the_text_of_scored_tokens_only(config):
    data = build_data(config())
    size = 0
    count = 0
    for batch in data.validation:
        labels = batch["labels"][:, 1:]
        scored = labels[labels != IGNORED]
        # A piece of an entry is a byte, also of a character of several.
        pieces = data.tokenizer.convert_ids_to_tokens(scored.tolist())
        size += len("".join(pieces).replace("<|endoftext|>", ""))
        count += len(scored)
    assert data.validation_bytes_per_token == pytest.approx(size / count)


@pytest.mark.parametrize("streaming", [False, True])
def test_fingerprint_tells_other_data_from_the_same_data(config, tmp_path, streaming):
    def fingerprint(**changes) -> str:
        return build_data(config(streaming=streaming, **changes)).fingerprint

    same = fingerprint()
    assert build_data(config(streaming=streaming), rank=1, world_size=2).fingerprint == same
    found = {same}
    for changes in ({"block_size": 16}, {"document_boundary": "carry"}, {"max_train_samples": 9}):
        found.add(fingerprint(**changes))
    if streaming:
        found.add(fingerprint(shuffle_buffer_size=9))
    else:
        found.add(fingerprint(seed=1))
        (tmp_path / "texts.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in TEXTS[1:]))
        found.add(fingerprint())
    assert len(found) == (5 if streaming else 6)


def test_a_tokenizer_is_made_from_the_training_text_where_none_is_named(config):
    data = build_data(config(tokenizer_name=None))
    again = build_data(config(tokenizer_name=None))
    assert data.tokenizer.get_vocab() == again.tokenizer.get_vocab()
    assert 300 < len(data.tokenizer) <= 4096
    assert data.tokenizer.tokenize("Document") == ["Document"]
    assert len(build_data(config(tokenizer_name=None, vocab_size=280)).tokenizer) == 280


def test_synthetic_rows_are_seeded_and_within_the_vocabulary():
    config = DataConfig(dataset_name="synthetic", vocab_size=500, block_size=16, max_train_samples=8)
    data = build_data(config)
    (first, state), (second, _) = islice(data.train, 2)
    rows, following = first["input_ids"], second["input_ids"]
    assert rows.shape == (8, 16) and 258 < int(rows.max()) < 500
    assert not torch.equal(rows, following)
    again, _ = next(iter(build_data(config).train))
    assert torch.equal(again["input_ids"], rows)
    resumed, _ = next(iter(build_data(config, state=state).train))
    assert torch.equal(resumed["input_ids"], following)
    assert data.validation_bytes_per_token == 1.0


def test_a_mixture_that_comes_with_the_package_is_read_in_any_folder(tmp_path, monkeypatch, tokenizer_dir):
    monkeypatch.chdir(tmp_path)
    Path("tinyshakespeare.txt").write_text("\n<|endoftext|>\n".join(TEXTS))
    config = DataConfig(dataset_mixture="recipes/mixtures/tiny.yaml", tokenizer_name=tokenizer_dir, block_size=32)
    names = [name for name, _, _ in text_facts(config, load_tokenizer(tokenizer_dir))["--dataset_mixture"]]
    assert names == ["tiny.yaml", "tinyshakespeare.txt"]


def test_bad_input_is_told_in_one_sentence(config, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for changes, words in (
        ({"block_size": 100_000}, "--block_size 100000"),
        ({"vocab_size": 299}, "--tokenizer_name.* 299"),
        ({"tokenizer_name": "none/here"}, "--tokenizer_name none/here"),
    ):
        with pytest.raises(ValueError, match=words):
            build_data(config(**changes))


@pytest.mark.skipif("HOPE_TEST_DATA" not in os.environ, reason="HOPE_TEST_DATA names no folder with real texts")
def test_a_real_text_in_one_file():
    file = Path(os.environ["HOPE_TEST_DATA"]) / "text" / "tinyshakespeare.txt"
    data = build_data(DataConfig(train_file=str(file), block_size=256))
    tokens = 0
    for batch, _ in islice(data.train, data.train.batches_per_epoch):
        tokens += batch["input_ids"].numel()
    assert tokens > 0.98 * data.train_tokens
    held = torch.cat([batch["labels"][batch["labels"] != IGNORED] for batch in data.validation])
    text = file.read_bytes().decode("utf-8-sig")
    tail = data.tokenizer.decode(held[1:])
    assert text.endswith(tail) and 0.04 < len(tail) / len(text) < 0.06
