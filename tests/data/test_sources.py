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


@pytest.fixture(scope="session")
def tokenizer_name(mixture) -> str:
    return str(mixture.parent / "tokenizer")


@pytest.fixture(scope="session")
def other_tokenizer(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("other")
    save_tokenizer(train_tokenizer(["other words"], 270), folder)
    return str(folder)


@pytest.fixture(params=["mixture", "shards"])
def config(request, mixture, shards, tokenizer_name):
    """Builds the configuration of the same corpora, tokenized by the run or before it."""
    if request.param == "mixture":
        source = {"dataset_mixture": str(mixture), "tokenizer_name": tokenizer_name}
    else:
        source = {"train_shards": str(shards)}
    defaults = {"block_size": T, "per_device_train_batch_size": 4, "validation_split_percentage": 10}
    return lambda **values: DataConfig(**{**defaults, **source, **values})


@pytest.fixture
def mixed(tmp_path, tokenizer_name):
    """Builds the data of a mixture that is written here."""

    def build(corpora: str | dict, **options):
        path = tmp_path / "mixed.yaml"
        path.write_text(corpora if isinstance(corpora, str) else yaml.safe_dump({"corpora": corpora}, sort_keys=False))
        defaults = {"tokenizer_name": tokenizer_name, "block_size": T}
        return build_data(DataConfig(dataset_mixture=str(path), **defaults | options))

    return build


def rows_of(config, count, rank=0, world_size=1, state=None):
    data = build_data(config, rank=rank, world_size=world_size, state=state)
    return [(batch["input_ids"], state) for batch, state in islice(data.train, count)]


def text_in_order(blocks, tokenizer):
    """The text of all blocks one after another."""
    return tokenizer.decode(torch.cat([blocks[index].tokens for index in range(len(blocks))]))


def test_shards_are_the_mixture(mixture, shards, tokenizer_name):
    options = {"block_size": T, "validation_split_percentage": 10}
    raw = build_data(DataConfig(dataset_mixture=str(mixture), tokenizer_name=tokenizer_name, **options))
    prepared = build_data(DataConfig(train_shards=str(shards), **options))
    assert raw.train_tokens == prepared.train_tokens
    assert raw.validation_bytes_per_token == prepared.validation_bytes_per_token
    for (batch, state), (other, other_state) in islice(zip(raw.train, prepared.train, strict=True), 50):
        assert state == other_state and all(torch.equal(batch[name], other[name]) for name in batch)
    for batch, other in zip(raw.validation, prepared.validation, strict=True):
        assert all(torch.equal(batch[name], other[name]) for name in batch)


def test_tokens_have_the_shares_of_the_weights(config):
    data = build_data(config())
    texts = [data.tokenizer.decode(row) for batch, _ in islice(data.train, 100) for row in batch["input_ids"]]
    # The first word of a row that shows its corpus.
    corpora = "".join(re.findall("[A-D]", text)[0] for text in texts if re.search("[A-D]", text))
    for corpus, weight in zip("ABCD", (0.4, 0.3, 0.2, 0.1), strict=True):
        assert abs(corpora.count(corpus) / len(corpora) - weight) < 0.05


def test_limits_and_filters_hold_and_validation_is_not_trained_on(config):
    data = build_data(config())
    text = text_in_order(data.train.loader.blocks, data.tokenizer)
    assert "Short." not in text and text.count(sentence(1, 3)) == 1
    # A few are cut: a corpus ends with its last whole block.
    assert 69 <= sum(sentence(2, number) in text for number in range(120)) <= 70
    held = text_in_order(data.validation.blocks, data.tokenizer)
    documents = [sentence(corpus, number) for corpus in range(3) for number in range(120)]
    held_out = [document for document in documents if document in held]
    assert len(held_out) > 10 and not any(document in text for document in held_out)
    assert len(build_data(config(max_eval_samples=1)).validation) < len(data.validation)


def test_ranks_read_together_what_one_process_reads(config):
    single = rows_of(config(), 12)
    assert not torch.equal(rows_of(config(seed=1), 1)[0][0], single[0][0])
    ranks = [rows_of(config(per_device_train_batch_size=1), 12, rank, world_size=4) for rank in range(4)]
    for (rows, state), *of_ranks in zip(single, *ranks, strict=True):
        together = torch.stack([rank_rows for rank_rows, _ in of_ranks], dim=1).flatten(0, 1)
        assert torch.equal(together, rows)
        assert all(rank_state == state for _, rank_state in of_ranks)


def test_resume_is_exact_across_epochs(config):
    epoch = build_data(config()).train.batches_per_epoch
    whole = rows_of(config(), 3 * epoch)
    for cut in (epoch, len(whole) - 5):
        state = json.loads(json.dumps(whole[cut - 1][1]))
        resumed = rows_of(config(), 5, state=state)
        assert all(torch.equal(rows, again) for (rows, _), (again, _) in zip(whole[cut:], resumed, strict=False))


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


@pytest.mark.parametrize(
    "settings, words",
    [
        ("files: {}/none/*.txt", "corpus a: files .*none/"),
        ("files: {}/pages.jsonl, text_column: body", "corpus a: files .*pages.jsonl .*'body'.* kind, page"),
        ("files: {}/book.txt, text_column: page", "corpus a: files .*book.txt .*text_column"),
        ("files: {}/pages.jsonl", "corpus a: files .*'text'.* kind, page"),
        ("files: {}/book.txt, min_length: 1000000", "corpus a .*min_length 1"),
        ("files: {}/blank.txt", "corpus a .*blank 1"),
        ("files: {}/rows.jsonl, max_documents: 500", "corpus a .* 7. .*max_documents"),
        ("files: {}/rows.jsonl, max_tokens: 500000", "corpus a .*max_tokens 500000"),
        ("shards: {}", "corpus a: shards .*manifest.json"),
        ("dataset_name: '{}/nowhere'", "corpus a: .*nowhere"),
        ("dataset_name: '{}/programmed'", "corpus a: .*programmed.py"),
    ],
)
def test_a_corpus_that_cannot_be_read_is_named(mixture, tmp_path, mixed, settings, words):
    (mixture.parent / "blank.txt").write_text(" \n")
    folder = mixture.parent / "programmed"
    folder.mkdir(exist_ok=True)
    (folder / "programmed.py").write_text(f"open('{tmp_path}/ran', 'w')")
    (folder / "train.jsonl").write_text('{"text": "a"}\n')
    with pytest.raises(ValueError, match=words):
        mixed(f"corpora: {{a: {{{settings.format(mixture.parent)}}}}}")
    # The program of a data set is not run.
    assert not (tmp_path / "ran").exists()


def test_a_corpus_shorter_than_a_block_and_a_missing_tokenizer_are_named(mixture, mixed, shards):
    with pytest.raises(ValueError, match="--block_size 5000 .*corpus notes .* 2048"):
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
    refused = pytest.raises(ValueError, match=r"--train_shards: .*rows/train-00001.bin .*hope-hf prepare")
    path.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    with refused:
        open_copy(copy)
    path.write_bytes(content[:-2])
    with refused:
        open_copy(copy)
    path.unlink()
    with refused:
        open_copy(copy)
    os.mkfifo(path)
    with refused:
        open_copy(copy)
    path.unlink()
    (tmp_path / "outside.bin").write_bytes(content)
    path.symlink_to(tmp_path / "outside.bin")
    with refused:
        open_copy(copy)


def test_no_shard_stays_open_and_one_that_is_cut_or_lost_in_use_is_named(copy):
    stream = open_folder(str(copy), "--train_shards").corpora[0].train
    before = len(os.listdir("/dev/fd"))
    assert len(stream.read(0, len(stream))) == len(stream)
    assert len(os.listdir("/dev/fd")) == before
    path = copy / "notes" / "train-00001.bin"
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(ValueError, match="train-00001.bin was truncated"):
        stream.read(0, len(stream))
    path.unlink()
    with pytest.raises(ValueError, match="train-00001.bin cannot be read"):
        stream.read(0, len(stream))


SHARD = "corpora/rows/train/shards/0"


@pytest.mark.parametrize(
    "path, value, words",
    [
        ("format", 0, "another version"),
        ("corpora", [], ""),
        ("corpora", {}, "corpora is empty"),
        ("dtype", ["uint16"], ""),
        ("tokenizer", {}, "'sha256'"),
        ("eos_token_id", 10**12, "eos_token_id is 10+"),
        ("eos_token_id", 5, "eos_token_id 5, .* 0"),
        ("plan", [], "plan"),
        ("corpora/\x1b[31m", {"weight": 1}, r"'\\x1b\[31m'"),
        ("corpora/rows/weight", None, "no weight to rows"),
        ("corpora/rows/weight", 1e308, r"'rows' of weight 1e\+308"),
        (f"{SHARD}/file", "../x", "'../x'"),
        (f"{SHARD}/tokens", -1, "-1 tokens"),
    ],
)
def test_a_broken_manifest_is_named(copy, path, value, words):
    manifest = json.loads((copy / MANIFEST).read_text())
    *parents, last = path.split("/")
    parent = manifest
    for key in parents:
        parent = parent[int(key) if key.isdecimal() else key]
    parent[last] = value
    (copy / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match=rf"--train_shards .*manifest.json .*{words}.*prepare"):
        open_copy(copy)


@pytest.mark.parametrize("content", ["[]", "[" * 100_000, "9" * 5_000, "\xff", None])
def test_a_manifest_that_is_no_json_object_is_named(copy, content):
    (copy / MANIFEST).unlink()
    if content is None:
        os.mkfifo(copy / MANIFEST)
    else:
        (copy / MANIFEST).write_text(content, encoding="latin-1")
    with pytest.raises(ValueError, match="--train_shards .*manifest.json .*prepare"):
        open_folder(str(copy), "--train_shards")


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


def test_100_gb_of_tokens_open_at_once(copy):
    tokens = 50_000_000_000
    manifest = json.loads((copy / MANIFEST).read_text())
    book = manifest["corpora"]["book"]["train"]
    shard = book["shards"][0] | {"tokens": tokens}
    book["shards"] = [shard]
    (copy / MANIFEST).write_text(json.dumps(manifest))
    with (copy / shard["file"]).open("r+b") as file:
        # Sparse: it takes no room on the disk.
        file.truncate(2 * tokens)
    begin = time.monotonic()
    data = build_data(DataConfig(train_shards=str(copy), block_size=2048, per_device_train_batch_size=4))
    batch, _ = next(iter(data.train))
    assert time.monotonic() - begin < 5
    assert batch["input_ids"].shape == (4, 2048) and data.train_tokens > tokens - 2048


def held_out(**config) -> dict[str, list[str]]:
    return validation_texts(DataConfig(**config, validation_split_percentage=10))[0]


def test_held_out_documents_of_a_mixture_and_of_its_shards(mixture, shards):
    """Corpus by corpus the same documents, and together the tokens that a run evaluates."""
    of_mixture, of_shards = held_out(dataset_mixture=str(mixture)), held_out(train_shards=str(shards))
    assert list(of_mixture) == list(of_shards) == ["notes", "rows", "pages", "book"]
    assert of_mixture == of_shards and all(of_mixture.values())
    data = open_copy(shards)
    ids = [data.tokenizer(text)["input_ids"] for texts in of_shards.values() for text in texts]
    # Every document begins with an EOS token.
    assert sum(len(row) + 1 for row in ids) == sum(len(block.tokens) for block in data.validation.blocks)
    some = {name: texts[:3] for name, texts in of_shards.items()}
    assert held_out(train_shards=str(shards), max_eval_samples=3) == some
    assert held_out(dataset_mixture=str(mixture), max_eval_samples=3) == some


def test_shards_inside_a_mixture_are_one_corpus(mixture, shards, tmp_path):
    pages = yaml.safe_load(mixture.read_text())["corpora"]["pages"]
    file = tmp_path / "mix.yaml"
    file.write_text(yaml.safe_dump({"corpora": {"old": {"shards": str(shards), "weight": 1}, "pages": pages}}))
    whole = held_out(train_shards=str(shards))
    assert held_out(dataset_mixture=str(file)) == {"old": sum(whole.values(), []), "pages": whole["pages"]}


def test_of_shards_whose_documents_begin_as_prompts_do(mixture, tokenizer_name, tmp_path):
    tokenizer = load_tokenizer(tokenizer_name)
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
