"""Mixtures and shards as data of a run: shares, limits, resuming, and what is refused."""

import json
import os
import re
import shutil
from itertools import islice

import pytest
import torch
import yaml
from four_corpora import sentence

from hope_hf.data import DataConfig, build_data, save_tokenizer, train_tokenizer, validation_texts
from hope_hf.data.shards import MANIFEST, file_hash

T = 16


@pytest.fixture(scope="session")
def tokenizer_name(mixture) -> str:
    return str(mixture.parent / "tokenizer")


@pytest.fixture(scope="session")
def other_tokenizer(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("other")
    save_tokenizer(train_tokenizer(["other words"], 270), folder)
    return str(folder)


@pytest.fixture
def config(shards):
    """Builds the configuration of a run on the shards."""
    defaults = {"train_shards": str(shards), "block_size": T, "per_device_train_batch_size": 4}
    return lambda **values: DataConfig(**{**defaults, "validation_split_percentage": 10, **values})


@pytest.fixture
def mixed(tmp_path, tokenizer_name):
    """Builds the data of a mixture that is written here."""

    def build(corpora: str | dict, **options):
        path = tmp_path / "mixed.yaml"
        path.write_text(corpora if isinstance(corpora, str) else yaml.safe_dump({"corpora": corpora}, sort_keys=False))
        defaults = {"tokenizer_name": tokenizer_name, "block_size": T}
        return build_data(DataConfig(dataset_mixture=str(path), **defaults | options))

    return build


def test_shards_are_the_mixture(mixture, shards, tokenizer_name):
    options = {"block_size": T, "validation_split_percentage": 10}
    raw = build_data(DataConfig(dataset_mixture=str(mixture), tokenizer_name=tokenizer_name, **options))
    prepared = build_data(DataConfig(train_shards=str(shards), **options))
    assert raw.train_tokens == prepared.train_tokens
    assert raw.validation_bytes_per_token == prepared.validation_bytes_per_token
    pairs = islice(zip(raw.train, prepared.train, strict=True), 50)
    for (batch, state), (other, other_state) in pairs:
        assert state == other_state
        assert all(torch.equal(batch[name], other[name]) for name in batch)
    for batch, other in zip(raw.validation, prepared.validation, strict=True):
        assert all(torch.equal(batch[name], other[name]) for name in batch)


def test_tokens_have_the_shares_of_the_weights(config):
    data = build_data(config())
    corpora = ""
    for batch, _ in islice(data.train, 100):
        for row in batch["input_ids"]:
            # The first word of a row that shows its corpus.
            shown = re.search("[A-D]", data.tokenizer.decode(row))
            corpora += shown[0] if shown else ""
    for corpus, weight in zip("ABCD", (0.4, 0.3, 0.2, 0.1), strict=True):
        assert abs(corpora.count(corpus) / len(corpora) - weight) < 0.05


def test_resume_is_exact_across_epochs(config):
    data = build_data(config())
    epoch = data.train.batches_per_epoch
    whole = list(islice(data.train, 3 * epoch))
    for cut in (epoch, len(whole) - 5):
        state = json.loads(json.dumps(whole[cut - 1][1]))
        resumed = islice(build_data(config(), state=state).train, 5)
        for (batch, _), (again, _) in zip(whole[cut:], resumed, strict=False):
            assert torch.equal(batch["input_ids"], again["input_ids"])


def test_one_corpus_can_be_carried_on_and_several_cannot(config, mixture, mixed):
    with pytest.raises(ValueError, match="--document_boundary carry .* 4"):
        build_data(config(document_boundary="carry"))
    book = {"book": {"files": f"{mixture.parent}/book.txt"}}
    data = mixed(book, document_boundary="carry", per_device_train_batch_size=2)
    text = "".join(data.tokenizer.decode(batch["input_ids"][0]) for batch, _ in islice(data.train, 60))
    assert sentence(3, 5) + "\n\n" + sentence(3, 6) in text


def test_shards_are_a_corpus_of_a_mixture(mixture, shards, mixed, other_tokenizer):
    book = {"files": f"{mixture.parent}/book.txt", "weight": 1}
    corpora = {"prepared": {"shards": str(shards), "weight": 3}, "book": book}
    assert "prepared 75.0%, book 25.0%" in mixed(corpora).description
    with pytest.raises(ValueError, match="corpus prepared: shards .*tokenizer"):
        mixed(corpora, tokenizer_name=other_tokenizer)


@pytest.mark.parametrize("weight, words", [(9, r"notes 2\.\d times"), (1e-6, "nothing of notes")])
def test_a_corpus_that_is_read_again_or_not_at_all_is_named(mixture, mixed, weight, words):
    notes = {"files": f"{mixture.parent}/notes/*.txt", "weight": weight}
    pages = {"files": f"{mixture.parent}/pages.jsonl", "text_column": "page", "weight": 1}
    with pytest.warns(UserWarning, match=words):
        mixed({"notes": notes, "pages": pages})


def test_a_mixture_that_cannot_be_read_is_named(mixture, shards, tmp_path, mixed):
    home = mixture.parent
    (home / "blank.txt").write_text(" \n")
    programmed = home / "programmed"
    programmed.mkdir()
    (programmed / "programmed.py").write_text(f"open('{tmp_path}/ran', 'w')")
    (programmed / "train.jsonl").write_text('{"text": "a"}\n')
    for settings, words in (
        (f"files: {home}/none/*.txt", "files .*none/"),
        (f"files: {home}/pages.jsonl, text_column: body", "files .*pages.jsonl .*'body'.* kind, page"),
        (f"files: {home}/book.txt, text_column: page", "files .*book.txt .*text_column"),
        (f"files: {home}/pages.jsonl", "files .*'text'.* kind, page"),
        (f"files: {home}/book.txt, min_length: 1000000", "min_length 1"),
        (f"files: {home}/blank.txt", "blank 1"),
        (f"files: {home}/rows.jsonl, max_documents: 500", "max_documents"),
        (f"files: {home}/rows.jsonl, max_tokens: 500000", "max_tokens 500000"),
        (f"shards: {home}", "shards .*manifest.json"),
        (f"dataset_name: '{home}/nowhere'", "nowhere"),
        (f"dataset_name: '{home}/programmed'", "programmed.py"),
    ):
        with pytest.raises(ValueError, match=f"corpus a.*{words}"):
            mixed(f"corpora: {{a: {{{settings}}}}}")
    # The program of a data set is not run.
    assert not (tmp_path / "ran").exists()
    with pytest.raises(ValueError, match="--block_size 5000 .*corpus notes"):
        mixed(mixture.read_text(), block_size=5000)
    with pytest.raises(ValueError, match="--dataset_mixture .*--tokenizer_name"):
        mixed({"a": {"shards": str(shards)}}, tokenizer_name=None)


@pytest.fixture
def copy(shards, tmp_path):
    """A copy of the shards that a test may break."""
    return shutil.copytree(shards, tmp_path / "shards")


def open_copy(copy):
    return build_data(DataConfig(train_shards=str(copy), block_size=T))


def test_a_shard_that_is_changed_cut_lost_or_no_file_is_named(copy, tmp_path):
    path = copy / "rows" / "train-00001.bin"
    content = path.read_bytes()

    def refused():
        with pytest.raises(ValueError, match="--train_shards: .*rows/train-00001.bin .*hope-hf prepare"):
            open_copy(copy)

    path.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    refused()
    path.write_bytes(content[:-2])
    refused()
    path.unlink()
    refused()
    os.mkfifo(path)
    refused()
    path.unlink()
    (tmp_path / "outside.bin").write_bytes(content)
    path.symlink_to(tmp_path / "outside.bin")
    refused()


SHARD = "corpora/rows/train/shards/0"
# The place of a value in the manifest, another value, and words of the error.
MANIFESTS = [
    ("format", 0, "another version"),
    ("corpora", [], ""),
    ("corpora", {}, "corpora is empty"),
    ("dtype", ["uint16"], ""),
    ("tokenizer", {}, "'sha256'"),
    ("eos_token_id", 10**12, "eos_token_id is 10+"),
    ("eos_token_id", 5, "eos_token_id 5, .* 0"),
    ("corpora/\x1b[31m", {"weight": 1}, r"'\\x1b\[31m'"),
    ("corpora/rows/weight", None, "no weight to rows"),
    ("corpora/rows/weight", 1e308, r"'rows' of weight 1e\+308"),
    (f"{SHARD}/file", "../x", "'../x'"),
    (f"{SHARD}/tokens", -1, "-1 tokens"),
]


def test_a_broken_manifest_is_named(copy):
    whole = (copy / MANIFEST).read_text()
    contents = [("[]", ""), ("[" * 100_000, ""), ("9" * 5_000, "")]
    for path, value, words in MANIFESTS:
        manifest = json.loads(whole)
        *parents, last = path.split("/")
        parent = manifest
        for key in parents:
            parent = parent[int(key) if key.isdecimal() else key]
        parent[last] = value
        contents.append((json.dumps(manifest), words))
    for content, words in contents:
        (copy / MANIFEST).write_text(content)
        with pytest.raises(ValueError, match=rf"--train_shards .*manifest.json .*{words}.*prepare"):
            open_copy(copy)


def test_an_id_beyond_the_vocabulary_is_named_where_it_is_read(copy):
    manifest = json.loads((copy / MANIFEST).read_text())
    shard = manifest["corpora"]["rows"]["train"]["shards"][0]
    path = copy / shard["file"]
    content = bytearray(path.read_bytes())
    content[40:42] = b"\xff\xff"
    path.write_bytes(content)
    shard["sha256"] = file_hash(path)
    (copy / MANIFEST).write_text(json.dumps(manifest))
    data = open_copy(copy)
    with pytest.raises(ValueError, match=f"{shard['file']} holds the id 65535"):
        list(islice(data.train, 2 * data.train.batches_per_epoch))


def test_another_tokenizer_and_what_is_no_folder_of_shards_are_refused(shards, other_tokenizer, tmp_path):
    with pytest.raises(ValueError, match="--train_shards .*tokenizer"):
        build_data(DataConfig(train_shards=str(shards), tokenizer_name=other_tokenizer, block_size=T))
    with pytest.raises(ValueError, match="--train_shards .*none"):
        open_copy(tmp_path / "none")


def test_held_out_documents_of_a_mixture_and_of_its_shards(mixture, shards):
    """Corpus by corpus the same documents, and together the tokens that a run evaluates."""

    def held_out(**config) -> dict[str, list[str]]:
        texts, _ = validation_texts(DataConfig(**config, validation_split_percentage=10))
        return texts

    held = held_out(dataset_mixture=str(mixture))
    assert list(held) == ["notes", "rows", "pages", "book"] and all(held.values())
    assert held_out(train_shards=str(shards)) == held
    data = open_copy(shards)
    ids = [data.tokenizer(text)["input_ids"] for texts in held.values() for text in texts]
    # Every document begins with an EOS token.
    assert sum(len(row) + 1 for row in ids) == sum(len(block.tokens) for block in data.validation.blocks)
    few = {name: texts[:3] for name, texts in held.items()}
    assert held_out(train_shards=str(shards), max_eval_samples=3) == few
    assert held_out(dataset_mixture=str(mixture), max_eval_samples=3) == few
