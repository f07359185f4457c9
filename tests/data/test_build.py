"""build_data: from a configuration to batches, on a corpus of a few sentences."""

import json
import os
from itertools import islice
from pathlib import Path

import pytest
import torch

from hope_hf.data import DataConfig, build_data, save_tokenizer, train_tokenizer
from hope_hf.data.packing import IGNORED

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
    rows = [batch["input_ids"] for batch, _ in islice(data.train, data.train.batches_per_epoch)]
    assert len(rows) * 4 * 32 <= data.train_tokens < (len(rows) + 1) * 4 * 32
    held = [batch["labels"][batch["labels"] != IGNORED] for batch in data.validation]
    decoded = data.tokenizer.decode(torch.cat(held)).split("<|endoftext|>")
    assert decoded[0] == "" and set(decoded[1:]) < set(TEXTS)
    assert len(data.description.splitlines()) == 1 and f"{data.train_tokens:,} tokens" in data.description


def test_validation_is_the_same_in_every_pass_and_on_every_rank(config):
    one, other = build_data(config()), build_data(config(), rank=1, world_size=2)
    first = list(one.validation)
    for again in (list(one.validation), list(other.validation)):
        for left, right in zip(first, again, strict=True):
            assert all(torch.equal(left[name], right[name]) for name in left)
    assert {tuple(batch["input_ids"].shape) for batch in first[:-1]} <= {(4, 32)}


def test_bytes_per_token_counts_the_text_of_scored_tokens_only(config):
    data = build_data(config())
    size, count = 0, 0
    for batch in data.validation:
        scored = batch["labels"][:, 1:][batch["labels"][:, 1:] != IGNORED]
        # A piece of an entry is a byte, also of a character of several.
        pieces = data.tokenizer.convert_ids_to_tokens(scored.tolist())
        size += len("".join(pieces).replace("<|endoftext|>", ""))
        count += len(scored)
    assert data.validation_bytes_per_token == pytest.approx(size / count)
    # One block over everything: exactly all bytes of the documents.
    whole = build_data(config(block_size=2048, max_train_samples=None, max_eval_samples=1))
    (batch,) = whole.validation
    scored = batch["labels"][0, 1:][batch["labels"][0, 1:] != IGNORED]
    assert whole.validation_bytes_per_token * len(scored) == len(whole.tokenizer.decode(scored).encode())


def test_fingerprint_tells_other_data_from_the_same_data(config, tmp_path):
    same = build_data(config()).fingerprint
    assert build_data(config(), rank=1, world_size=2).fingerprint == same
    assert build_data(config(per_device_train_batch_size=2, dataloader_num_workers=1)).fingerprint == same
    others = [{"block_size": 16}, {"seed": 1}, {"document_boundary": "carry"}, {"max_train_samples": 50}]
    found = {build_data(config(**changes)).fingerprint for changes in others} | {same}
    (tmp_path / "texts.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in TEXTS[1:]))
    assert len(found | {build_data(config()).fingerprint}) == 6


def test_fingerprint_of_a_stream(config):
    changes = [{}, {}, {"block_size": 16}, {"max_train_samples": 9}, {"validation_split_percentage": 30},
               {"shuffle_buffer_size": 9}]  # fmt: skip
    fingerprints = [build_data(config(streaming=True, **change)).fingerprint for change in changes]
    assert fingerprints[0] == fingerprints[1] and len(set(fingerprints)) == 5


@pytest.mark.parametrize(
    "boundary, options, alike",
    [("reset", {}, False), ("reset", {"shuffle_buffer_size": 1}, True), ("carry", {}, True)],
)
def test_the_seed_draws_the_order_of_a_stream(config, boundary, options, alike):
    rows = []
    for seed in (1, 2):
        data = build_data(config(streaming=True, seed=seed, document_boundary=boundary, **options))
        batches = [batch for batch, _ in islice(data.train, 3)]
        assert ("position_ids" in batches[0]) == (boundary == "reset")
        rows.append(torch.cat([batch["input_ids"] for batch in batches]))
    assert torch.equal(*rows) == alike


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
    assert first.keys() == {"input_ids", "labels"} and first["input_ids"].shape == (8, 16)
    assert 258 < int(first["input_ids"].max()) < 500
    assert torch.equal(next(iter(build_data(config).train))[0]["input_ids"], first["input_ids"])
    following, _ = next(iter(build_data(config, state=state).train))
    assert torch.equal(following["input_ids"], second["input_ids"])
    assert not torch.equal(first["input_ids"], second["input_ids"])
    assert data.validation_bytes_per_token == 1.0
    held = next(iter(data.validation))["input_ids"]
    assert not (held[:, None] == first["input_ids"]).all(dim=2).any()


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"block_size": 100_000}, "--block_size 100000"),
        ({"vocab_size": 299}, "--tokenizer_name.* 299"),
        ({"tokenizer_name": "none/here"}, "--tokenizer_name none/here"),
    ],
)
def test_bad_input_is_told_in_one_sentence(config, monkeypatch, changes, words):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=words) as caught:
        build_data(config(**changes))
    assert "\n" not in str(caught.value)


def test_a_hub_data_set_needs_a_tokenizer(config, tmp_path):
    folder = tmp_path / "set"
    folder.mkdir()
    os.rename(tmp_path / "texts.jsonl", folder / "train.jsonl")
    with pytest.raises(ValueError, match="--dataset_name .*--tokenizer_name"):
        build_data(config(train_file=None, dataset_name=str(folder), tokenizer_name=None))
    assert build_data(config(train_file=None, dataset_name=str(folder))).train_tokens > 0


@pytest.mark.skipif("HOPE_TEST_DATA" not in os.environ, reason="HOPE_TEST_DATA names no folder with real texts")
def test_a_real_text_in_one_file():
    file = Path(os.environ["HOPE_TEST_DATA"]) / "text" / "tinyshakespeare.txt"
    data = build_data(DataConfig(train_file=str(file), block_size=256))
    batches = list(islice(data.train, data.train.batches_per_epoch))
    assert sum(batch["input_ids"].numel() for batch, _ in batches) > 0.98 * data.train_tokens
    held = torch.cat([batch["labels"][batch["labels"] != IGNORED] for batch in data.validation])
    text = file.read_bytes().decode("utf-8-sig")
    assert text.endswith(data.tokenizer.decode(held[1:]))
    assert 0.04 < len(data.tokenizer.decode(held)) / len(text) < 0.06
