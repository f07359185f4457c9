"""Mixtures and shards as data of a run: shares, ranks, resuming, and what is refused."""

import json
import os
import re
import shutil
import time
from itertools import islice

import pytest
import torch
import yaml
from four_corpora import prepare_words, sentence
from tokenizers.processors import TemplateProcessing

from hope_hf.data import DataConfig, build_data, load_tokenizer, save_tokenizer, train_tokenizer, validation_texts
from hope_hf.data.prepare import main
from hope_hf.data.shards import MANIFEST, file_hash, open_folder

T = 16


@pytest.fixture(params=["mixture", "shards"])
def config(request, mixture, shards):
    """Builds the configuration of the same corpora, tokenized by the run or before it."""
    sources = {
        "mixture": {"dataset_mixture": str(mixture), "tokenizer_name": str(mixture.parent / "tokenizer")},
        "shards": {"train_shards": str(shards)},
    }
    defaults = {"block_size": T, "per_device_train_batch_size": 4, "validation_split_percentage": 10}
    return lambda **values: DataConfig(**{**defaults, **sources[request.param], **values})


def rows_of(config, count, rank=0, world_size=1, state=None):
    data = build_data(config, rank=rank, world_size=world_size, state=state)
    return [(batch["input_ids"], state) for batch, state in islice(data.train, count)]


def text_in_order(blocks, tokenizer):
    """The text of all blocks one after another."""
    return tokenizer.decode(torch.cat([blocks[index].tokens for index in range(len(blocks))]))


def test_shards_are_the_mixture(mixture, shards):
    tokens = {"block_size": T, "validation_split_percentage": 10}
    raw = build_data(
        DataConfig(dataset_mixture=str(mixture), tokenizer_name=str(mixture.parent / "tokenizer"), **tokens)
    )
    prepared = build_data(DataConfig(train_shards=str(shards), **tokens))
    assert raw.train_tokens == prepared.train_tokens
    assert raw.validation_bytes_per_token == prepared.validation_bytes_per_token
    for (batch, state), (other, other_state) in islice(zip(raw.train, prepared.train, strict=True), 50):
        assert state == other_state and all(torch.equal(batch[name], other[name]) for name in batch)
    assert len(raw.validation) == len(prepared.validation)
    for batch, other in zip(raw.validation, prepared.validation, strict=True):
        assert all(torch.equal(batch[name], other[name]) for name in batch)


def test_tokens_have_the_shares_of_the_weights(config):
    data = build_data(config())
    texts = [data.tokenizer.decode(row) for batch, _ in islice(data.train, 100) for row in batch["input_ids"]]
    corpora = [found.group() for text in texts if (found := re.search("[A-D]", text))]
    for corpus, weight in zip("ABCD", (0.4, 0.3, 0.2, 0.1), strict=True):
        assert abs(corpora.count(corpus) / len(corpora) - weight) < 0.05


def test_limits_and_filters_hold_for_what_is_read(config, mixture):
    data = build_data(config())
    text = text_in_order(data.train.loader.blocks, data.tokenizer)
    assert "Short." not in text and text.count(sentence(1, 3)) == 1
    # A few are cut: a corpus ends with its last whole block.
    assert 69 <= sum(sentence(2, number) in text for number in range(120)) <= 70


@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_read_together_what_one_process_reads_and_no_block_twice(config, world_size):
    batches = 12
    single = rows_of(config(per_device_train_batch_size=4), batches)
    ranks = [
        rows_of(config(per_device_train_batch_size=4 // world_size), batches, rank, world_size)
        for rank in range(world_size)
    ]
    for step, (rows, state) in enumerate(single):
        together = torch.stack([ranks[rank][step][0] for rank in range(world_size)], dim=1).flatten(0, 1)
        assert torch.equal(together, rows)
        assert all(ranks[rank][step][1] == state for rank in range(world_size))


def test_resume_is_exact_across_epochs(config):
    data = build_data(config())
    whole = rows_of(config(), 3 * data.train.batches_per_epoch)
    for cut in (1, 7, data.train.batches_per_epoch, len(whole) - 5):
        state = json.loads(json.dumps(whole[cut - 1][1]))
        resumed = rows_of(config(), 5, state=state)
        assert all(torch.equal(rows, again) for (rows, _), (again, _) in zip(whole[cut:], resumed, strict=False))


def test_the_seed_draws_order_and_limited_documents(config, request):
    first, other = build_data(config(seed=1)), build_data(config(seed=2))
    assert first.fingerprint != other.fingerprint == build_data(config(seed=2)).fingerprint
    assert not torch.equal(next(iter(first.train))[0]["input_ids"], next(iter(other.train))[0]["input_ids"])


def test_validation_documents_are_not_trained_on_and_can_be_fewer(config):
    data = build_data(config())
    held = text_in_order(data.validation.blocks, data.tokenizer)
    trained = text_in_order(data.train.loader.blocks, data.tokenizer)
    documents = [sentence(corpus, number) for corpus in range(3) for number in range(120)]
    held_out = [document for document in documents if document in held]
    assert len(held_out) > 10 and not any(document in trained for document in held_out)
    assert len(build_data(config(max_eval_samples=1)).validation) < len(build_data(config()).validation)


def test_memories_are_not_carried_from_corpus_to_corpus(config):
    with pytest.raises(ValueError, match="--document_boundary carry reads one text .* mixes 4: use"):
        build_data(config(document_boundary="carry"))


def test_one_corpus_can_be_carried_on(mixture, tmp_path):
    path = tmp_path / "one.yaml"
    path.write_text(f"corpora: {{book: {{files: {mixture.parent}/book.txt}}}}")
    config = DataConfig(
        dataset_mixture=str(path),
        tokenizer_name=str(mixture.parent / "tokenizer"),
        document_boundary="carry",
        block_size=T,
        per_device_train_batch_size=2,
    )
    data = build_data(config)
    text = "".join(data.tokenizer.decode(batch["input_ids"][0]) for batch, _ in islice(data.train, 60))
    assert sentence(3, 5) + "\n\n" + sentence(3, 6) in text


def test_shards_are_a_corpus_of_a_mixture(mixture, shards, tmp_path):
    path = tmp_path / "with_shards.yaml"
    path.write_text(
        f"corpora: {{prepared: {{shards: {shards}, weight: 3}}, "
        f"book: {{files: {mixture.parent}/book.txt, weight: 1}}}}"
    )
    data = build_data(DataConfig(dataset_mixture=str(path), tokenizer_name=str(shards / "tokenizer"), block_size=T))
    assert "prepared 75.0%, book 25.0%" in data.description
    other = tmp_path / "other"
    save_tokenizer(train_tokenizer(["other words"], 270), other)
    with pytest.raises(ValueError, match="corpus prepared: shards .* was made with another tokenizer than"):
        build_data(DataConfig(dataset_mixture=str(path), tokenizer_name=str(other), block_size=T))


@pytest.mark.parametrize(
    "weights, named", [((9, 1), r"notes 2\.\d times"), ((1e-6, 1), "nothing of notes, whose weight is less than half")]
)
def test_a_corpus_that_is_read_again_or_not_at_all_is_named(mixture, tmp_path, weights, named):
    path = tmp_path / "mix.yaml"
    notes, pages = (f"{mixture.parent}/{name}" for name in ("notes/*.txt", "pages.jsonl"))
    first, second = weights
    path.write_text(f"corpora: {{notes: {{files: {notes}, weight: {first:f}}}, pages: {{files: {pages}, weight: "
                    f"{second}, text_column: page}}}}")  # fmt: skip
    with pytest.warns(UserWarning, match=rf"An epoch of \d+ blocks reads {named}"):
        build_data(
            DataConfig(dataset_mixture=str(path), tokenizer_name=str(mixture.parent / "tokenizer"), block_size=T)
        )


@pytest.mark.parametrize(
    "settings, sentence",
    [
        ("files: {}/none/*.txt", "corpus a: files .*none/.* matches no file"),
        ("files: {}/pages.jsonl, text_column: body", "corpus a: files .* has no column 'body' of strings among kind,"),
        (
            "files: {}/book.txt, text_column: page",
            "corpus a: files .*book.txt has no columns, and text_c",
        ),
        ("files: {}/pages.jsonl", "corpus a: files .* has no column 'text' among kind, page"),
        ("files: {}/book.txt, min_length: 1000000", "corpus a has no document to read .min_length 1.: check its"),
        ("files: {}/rows.jsonl, max_documents: 500", "corpus a has 7. training documents, fewer than max_documents"),
        ("files: {}/rows.jsonl, max_tokens: 500000", "corpus a has .* tokens, fewer than max_tokens 500000: lower"),
        ("shards: {}", "corpus a: shards .* has no manifest.json: finish it with hope-hf prepare"),
        ("dataset_name: '{}/nowhere'", "corpus a: .*nowhere .split train. is neither a folder"),
    ],
)
def test_a_corpus_that_cannot_be_read_is_named(mixture, tmp_path, monkeypatch, settings, sentence):
    path = tmp_path / "mix.yaml"
    path.write_text(f"corpora: {{a: {{{settings.format(mixture.parent)}}}}}")
    with pytest.raises(ValueError, match=sentence):
        build_data(
            DataConfig(dataset_mixture=str(path), tokenizer_name=str(mixture.parent / "tokenizer"), block_size=T)
        )


def test_the_program_of_a_data_set_is_named_and_not_run(mixture, tmp_path):
    folder = tmp_path / "programmed"
    folder.mkdir()
    (folder / "programmed.py").write_text(f"open('{tmp_path}/ran', 'w')")
    (folder / "train.jsonl").write_text('{"text": "a"}\n')
    path = tmp_path / "mix.yaml"
    path.write_text(f"corpora: {{a: {{dataset_name: {folder}}}}}")
    with pytest.raises(ValueError, match="corpus a: .* needs its program programmed.py, which is not run: name"):
        build_data(DataConfig(dataset_mixture=str(path), tokenizer_name=str(mixture.parent / "tokenizer")))
    assert not (tmp_path / "ran").exists()


def test_an_empty_split_is_named(tmp_path, mixture):
    (tmp_path / "empty.jsonl").write_text('{"text": " "}\n{"text": ""}\n')
    path = tmp_path / "mix.yaml"
    path.write_text(f"corpora: {{a: {{files: {tmp_path}/empty.jsonl}}}}")
    with pytest.raises(ValueError, match="corpus a has no document to read .blank 2.: check its split and filters"):
        build_data(DataConfig(dataset_mixture=str(path), tokenizer_name=str(mixture.parent / "tokenizer")))


def test_a_corpus_shorter_than_a_block_is_named(mixture):
    tokenizer = str(mixture.parent / "tokenizer")
    with pytest.raises(
        ValueError,
        match="--block_size 5000 is longer than the corpus notes of 3... tokens: lower it, such as to 2048,",
    ):
        build_data(DataConfig(dataset_mixture=str(mixture), tokenizer_name=tokenizer, block_size=5000))


def test_corpora_of_the_hub_need_a_tokenizer(tmp_path, shards):
    path = tmp_path / "mix.yaml"
    path.write_text(f"corpora: {{a: {{shards: {shards}}}}}")
    with pytest.raises(ValueError, match="--dataset_mixture .* needs a --tokenizer_name"):
        build_data(DataConfig(dataset_mixture=str(path), block_size=T))


@pytest.fixture
def copy(shards, tmp_path):
    """A copy of the shards that a test may break."""
    return shutil.copytree(shards, tmp_path / "shards")


def test_a_changed_shard_is_named(copy):
    path = copy / "rows" / "train-00001.bin"
    data = bytearray(path.read_bytes())
    data[0] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"--train_shards: .*train-00001.bin has changed .*: repeat the hope-hf"):
        build_data(DataConfig(train_shards=str(copy), block_size=T))


def first_shard(manifest):
    return manifest["corpora"]["rows"]["train"]["shards"][0]


def test_a_shard_that_is_cut_or_missing_is_named(copy):
    path = copy / "rows" / "train-00001.bin"
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(ValueError, match=r"train-00001.bin has \d+ bytes instead of \d+: repeat the hope-hf"):
        build_data(DataConfig(train_shards=str(copy), block_size=T))
    path.unlink()
    with pytest.raises(ValueError, match=r"train-00001.bin is missing: repeat the hope-hf"):
        build_data(DataConfig(train_shards=str(copy), block_size=T))


def test_no_shard_stays_open(shards):
    stream = open_folder(str(shards), "--train_shards").corpora[0].train
    before = len(os.listdir("/dev/fd"))
    assert len(stream.read(0, len(stream))) == len(stream)
    assert len(os.listdir("/dev/fd")) == before


def test_a_shard_that_is_cut_or_lost_in_use_is_named(copy):
    stream = open_folder(str(copy), "--train_shards").corpora[0].train
    path = copy / "notes" / "train-00001.bin"
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(ValueError, match="The shard .*train-00001.bin was truncated while it was in use: repeat the"):
        stream.read(0, len(stream))
    path.unlink()
    with pytest.raises(ValueError, match="The shard .*train-00001.bin cannot be read any more: No such file"):
        stream.read(0, len(stream))


@pytest.mark.parametrize(
    "change, sentence",
    [
        (lambda found: found.update(format=0), "is of another version"),
        (lambda found: found.pop("corpora"), "corpora is missing"),
        (lambda found: found.update(corpora=[]), r"corpora is \[\], not an object"),
        (lambda found: found.update(corpora={}), "corpora is empty"),
        (lambda found: found.update(dtype=["uint16"]), r"dtype is \['uint16'\], not uint16 or uint32"),
        (lambda found: found.update(tokenizer="x"), "tokenizer is 'x', not an object"),
        (lambda found: found["tokenizer"].update(sha256=1), "tokenizer.sha256 is 1, not a SHA-256"),
        (lambda found: found.update(eos_token_id=True), "eos_token_id is True, not a whole number"),
        (lambda found: found.update(eos_token_id=10**12), "eos_token_id is 10+, more than uint16 holds"),
        (lambda found: found.update(eos_token_id=5), "has eos_token_id 5, and the tokenizer begins documents with 0"),
        (lambda found: found["corpora"].update({"../x": {}}), "corpora has the name '../x'"),
        (lambda found: found["corpora"].update({"\x1b[31m": {}}), r"corpora has the name '\\x1b\[31m'"),
        (lambda found: found["corpora"]["rows"].update(weight=None), "it gives no weight to rows"),
        (lambda found: found["corpora"]["rows"].update(weight=1e308), r"rows.weight is 1e\+308, not null or a weight"),
        (lambda found: found["corpora"]["rows"].update(train=3), "corpora.rows.train is 3, not an object"),
        (lambda found: first_shard(found).update(file="../x"), r"train.shards\[0\].file is '../x', not the name of a"),
        (lambda found: first_shard(found).update(tokens=-1), r"shards\[0\].tokens is -1, not a whole number from 0"),
        (lambda found: first_shard(found).update(tokens="9"), r"shards\[0\].tokens is '9', not a whole number from 0"),
    ],
)
def test_a_broken_manifest_is_named(copy, change, sentence):
    manifest = json.loads((copy / MANIFEST).read_text())
    change(manifest)
    (copy / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match=rf"--train_shards .*manifest.json .*{sentence}.*: prepare the shards again"):
        build_data(DataConfig(train_shards=str(copy), block_size=T))


@pytest.mark.parametrize("content", ["", "[]", "[" * 100_000, "9" * 5_000, '{"format": NaN', "\xff"])
def test_a_manifest_that_is_no_json_object_is_named(copy, content):
    (copy / MANIFEST).write_text(content, encoding="latin-1")
    with pytest.raises(ValueError, match="--train_shards .*manifest.json cannot be read, prepare the shards again: "):
        open_folder(str(copy), "--train_shards")


@pytest.mark.parametrize("name", [MANIFEST, "rows/train-00001.bin"])
def test_a_pipe_in_the_place_of_a_file_is_named(copy, name):
    (copy / name).unlink()
    os.mkfifo(copy / name)
    with pytest.raises(ValueError, match=f"--train_shards.* .*{name} .*prepare"):
        open_folder(str(copy), "--train_shards")


def test_a_shard_that_is_a_link_out_of_the_folder_is_named(copy, tmp_path):
    shard = copy / "rows" / "train-00001.bin"
    shutil.move(shard, tmp_path / "outside.bin")
    shard.symlink_to(tmp_path / "outside.bin")
    with pytest.raises(ValueError, match="--train_shards: .*train-00001.bin is a link, pipe or folder"):
        open_folder(str(copy), "--train_shards")


def test_an_id_beyond_the_vocabulary_is_named_where_it_is_read(copy):
    manifest = json.loads((copy / MANIFEST).read_text())
    shard = first_shard(manifest)
    data = bytearray((copy / shard["file"]).read_bytes())
    data[40:42] = b"\xff\xff"
    (copy / shard["file"]).write_bytes(data)
    shard["sha256"] = file_hash(copy / shard["file"])
    (copy / MANIFEST).write_text(json.dumps(manifest))
    data = build_data(DataConfig(train_shards=str(copy), block_size=T))
    with pytest.raises(ValueError, match=f"The shard .*{shard['file']} holds the id 65535, and the tokenizer's ids"):
        rows_of(DataConfig(train_shards=str(copy), block_size=T), 2 * data.train.batches_per_epoch)


def test_another_tokenizer_is_refused(shards, tmp_path):
    save_tokenizer(train_tokenizer(["other words"], 270), tmp_path / "other")
    with pytest.raises(ValueError, match="--train_shards .* was made with another tokenizer than .*other: prep"):
        build_data(DataConfig(train_shards=str(shards), tokenizer_name=str(tmp_path / "other"), block_size=T))


def test_what_is_no_folder_of_shards_is_named(tmp_path):
    with pytest.raises(ValueError, match="--train_shards .*none is not a folder: name one that hope-hf prepare"):
        build_data(DataConfig(train_shards=str(tmp_path / "none"), block_size=T))


def test_100_gb_of_tokens_open_at_once(copy):
    tokens = 50_000_000_000
    manifest = json.loads((copy / MANIFEST).read_text())
    (shard,) = manifest["corpora"]["book"]["train"]["shards"][:1]
    shard["tokens"] = tokens
    manifest["corpora"]["book"]["train"]["shards"] = [shard]
    (copy / MANIFEST).write_text(json.dumps(manifest))
    with (copy / shard["file"]).open("r+b") as file:
        # Sparse: it takes no room on the disk.
        file.truncate(2 * tokens)
    begin = time.monotonic()
    data = build_data(DataConfig(train_shards=str(copy), block_size=2048, per_device_train_batch_size=4))
    batch, _ = next(iter(data.train))
    assert time.monotonic() - begin < 5
    assert batch["input_ids"].shape == (4, 2048) and data.train_tokens > tokens - 2048


@pytest.fixture
def tokenizer_name(mixture) -> str:
    return str(mixture.parent / "tokenizer")


def held_out(**config) -> dict[str, list[str]]:
    return validation_texts(DataConfig(**config, validation_split_percentage=10))[0]


def test_of_a_mixture_and_of_its_shards(mixture, shards, tokenizer_name):
    """Corpus by corpus the same documents, and together the tokens that a run evaluates."""
    of_mixture, of_shards = held_out(dataset_mixture=str(mixture)), held_out(train_shards=str(shards))
    assert list(of_mixture) == list(of_shards) == ["notes", "rows", "pages", "book"]
    assert of_mixture == of_shards and all(of_mixture.values())
    data = build_data(DataConfig(train_shards=str(shards), block_size=16))
    ids = [data.tokenizer(text)["input_ids"] for texts in of_shards.values() for text in texts]
    # Every document begins with an EOS token.
    assert sum(len(row) + 1 for row in ids) == sum(len(block.tokens) for block in data.validation.blocks)


@pytest.mark.parametrize("count", [1, 3])
def test_the_first_documents_of_every_corpus(mixture, shards, count):
    whole, some = held_out(train_shards=str(shards)), held_out(train_shards=str(shards), max_eval_samples=count)
    assert some == {name: texts[:count] for name, texts in whole.items()}
    assert some == held_out(dataset_mixture=str(mixture), max_eval_samples=count)


def test_shards_inside_a_mixture_are_one_corpus(mixture, shards, tmp_path):
    corpora = {"old": {"shards": str(shards)}, "pages": yaml.safe_load(mixture.read_text())["corpora"]["pages"]}
    file = tmp_path / "mix.yaml"
    file.write_text(yaml.safe_dump({"corpora": {name: corpora[name] | {"weight": 1} for name in corpora}}))
    found, whole = held_out(dataset_mixture=str(file)), held_out(train_shards=str(shards))
    assert found == {"old": sum(whole.values(), []), "pages": whole["pages"]}


def test_of_shards_whose_documents_begin_as_prompts_do(mixture, tmp_path):
    tokenizer = load_tokenizer(str(mixture.parent / "tokenizer"))
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    template = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)])
    tokenizer.backend_tokenizer.post_processor = template
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    words = prepare_words(mixture, tmp_path / "shards")
    words[words.index("--tokenizer_name") + 1] = str(tmp_path / "tokenizer")
    assert main(words) == 0
    assert held_out(train_shards=str(tmp_path / "shards")) == held_out(dataset_mixture=str(mixture))
    block = build_data(DataConfig(train_shards=str(tmp_path / "shards"), block_size=500)).validation.blocks[0]
    assert (block.tokens[block.starts] == tokenizer.bos_token_id).all() and len(block.starts) > 1
    assert (block.tokens[block.starts[1:] - 1] == tokenizer.eos_token_id).all()


def test_other_text_is_one_corpus():
    texts, source = validation_texts(DataConfig(max_eval_samples=2))
    assert list(texts) == ["text"] and len(texts["text"]) == 2 and source == "built-in corpus"
