"""Sources: which documents a flag gives, which are held out, and the errors for bad input."""

import json
import os

import pytest
from datasets import Dataset

from hope_hf.data.config import DataConfig
from hope_hf.data.documents import corpus_documents, held_out, open_sources, split_documents

TEXTS = [f"Document {index}: " + "words and more words. " * (index % 5 + 1) for index in range(60)]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def write(folder, kind, texts=TEXTS, column="text"):
    file = folder / f"texts.{kind}"
    if kind == "txt":
        file.write_text("\n<|endoftext|>\n".join(texts), encoding="utf-8")
    elif kind == "parquet":
        Dataset.from_dict({column: texts, "number": list(range(len(texts)))}).to_parquet(file)
    else:
        rows = [json.dumps({column: text, "number": index}) for index, text in enumerate(texts)]
        file.write_text("\n".join(rows) if kind == "jsonl" else f"[{','.join(rows)}]", encoding="utf-8")
    return str(file)


def read(documents):
    return [row["text"].strip() for row in documents]


@pytest.mark.parametrize("kind", ["txt", "json", "jsonl", "parquet"])
@pytest.mark.parametrize("streaming", [False, True])
def test_every_kind_of_file_gives_the_same_split(tmp_path, kind, streaming):
    file = write(tmp_path, kind)
    sources = open_sources(DataConfig(train_file=file, streaming=streaming, validation_split_percentage=20))
    train, held = read(sources.train), read(sources.validation)
    assert sorted(train + held) == sorted(text.strip() for text in TEXTS)
    assert 0 < len(held) < len(train)
    if kind != "txt":
        assert set(held) == {text.strip() for text in TEXTS if held_out(text, 20)}


@pytest.mark.parametrize("streaming", [False, True])
def test_validation_file_leaves_all_documents_to_training(tmp_path, streaming):
    train, held = write(tmp_path, "jsonl"), write(tmp_path, "txt", ["only this"])
    sources = open_sources(DataConfig(train_file=train, validation_file=held, streaming=streaming))
    assert len(read(sources.train)) == len(TEXTS) and read(sources.validation) == ["only this"]


@pytest.mark.parametrize("streaming", [False, True])
def test_sample_limits_count_documents_after_the_split(tmp_path, streaming):
    config = DataConfig(
        train_file=write(tmp_path, "jsonl"),
        streaming=streaming,
        validation_split_percentage=20,
        max_train_samples=7,
        max_eval_samples=2,
    )
    sources = open_sources(config)
    assert len(read(sources.train)) == 7 and len(read(sources.validation)) == 2
    assert not any(held_out(row["text"], 20) for row in sources.train)


def test_a_glob_gives_one_document_per_text_file(tmp_path):
    for index, text in enumerate(TEXTS[:10]):
        (tmp_path / f"{index}.txt").write_text(text)
    sources = open_sources(DataConfig(train_file=str(tmp_path / "*.txt")))
    assert sorted(read(sources.train) + read(sources.validation)) == sorted(text.strip() for text in TEXTS[:10])


def test_one_long_text_is_parted_at_a_blank_line_near_its_end(tmp_path):
    text = "\n\n".join(f"Speaker {index}:\nThis is what I say." for index in range(200))
    (tmp_path / "play.txt").write_text(text)
    sources = open_sources(DataConfig(train_file=str(tmp_path / "play.txt"), validation_split_percentage=10))
    (head,), (tail,) = [[row["text"] for row in part] for part in (sources.train, sources.validation)]
    assert head + tail == text and tail.startswith("Speaker 1")
    assert 0.09 < len(tail) / len(text) < 0.11


@pytest.mark.parametrize("between", ["\n", " "])
@pytest.mark.parametrize("at_the_end", [False, True])
def test_one_long_text_is_parted_near_its_end_where_blank_lines_are_elsewhere(tmp_path, between, at_the_end):
    """A blank line after the title or before the last words would leave one side without text."""
    body = between.join(["some words of the book"] * 2_000)
    (tmp_path / "book.txt").write_text(f"{body}\n\nTHE END" if at_the_end else f"A TITLE\n\n{body}")
    sources = open_sources(DataConfig(train_file=str(tmp_path / "book.txt")))
    (train,), (held,) = read(sources.train), read(sources.validation)
    assert len(held) / (len(train) + len(held)) == pytest.approx(0.05, abs=0.001)


def test_a_short_text_is_parted_at_its_nearest_blank_line(tmp_path):
    (tmp_path / "a.txt").write_text("A title\n\n" + "One sentence of a short text. " * 2)
    sources = open_sources(DataConfig(train_file=str(tmp_path / "a.txt")))
    assert read(sources.train) == ["A title"]


def test_line_ends_and_blank_lines_of_any_system_are_kept(tmp_path):
    (tmp_path / "play.txt").write_bytes(b"\xef\xbb\xbfone\r\n \r\ntwo\r\n\r\nthree\r\n")
    sources = open_sources(DataConfig(train_file=str(tmp_path / "play.txt"), validation_split_percentage=20))
    assert [row["text"] for row in sources.train] == ["one\r\n \r\ntwo\r\n\r\n"]
    assert [row["text"] for row in sources.validation] == ["three\r\n"]


def test_the_only_string_column_is_the_text(tmp_path):
    sources = open_sources(DataConfig(train_file=write(tmp_path, "jsonl", column="page")))
    assert len(read(sources.train)) + len(read(sources.validation)) == len(TEXTS)


def test_changed_files_are_read_anew(tmp_path):
    for texts in (["first a", "first b"], ["second a", "second b"]):
        for kind in ("txt", "jsonl"):
            sources = open_sources(DataConfig(train_file=write(tmp_path, kind, texts)))
            assert sorted(read(sources.train) + read(sources.validation)) == texts


def test_a_folder_of_files_is_a_data_set(tmp_path):
    folder = tmp_path / "set"
    folder.mkdir()
    Dataset.from_dict({"text": TEXTS[:6]}).to_parquet(folder / "train.parquet")
    Dataset.from_dict({"text": TEXTS[6:8]}).to_parquet(folder / "validation.parquet")
    sources = open_sources(DataConfig(dataset_name=str(folder)))
    assert (len(sources.train), len(sources.validation)) == (6, 2)


def test_split_is_by_content_and_leaves_no_side_empty():
    keys = [f"key {index}" for index in range(400)]
    train, held = split_documents(keys, 10)
    assert sorted(train + held) == list(range(400)) and 20 < len(held) < 60
    # Another order or a removed document moves no other one.
    _, reversed_held = split_documents(keys[:0:-1], 10)
    assert {keys[index] for index in held} - {keys[0]} == {keys[:0:-1][index] for index in reversed_held}
    for percentage in (0.001, 99.999):
        for parts in split_documents(["a", "b", "a", "b", " "], percentage):
            assert len(parts) == 2
    assert split_documents(["a", "a"], 50)[1] == []


def test_builtin_corpus_has_sources_and_reference_but_no_tests():
    documents = dict(corpus_documents())
    assert {"asyncio/events.py", "json/decoder.py", "pydoc_data/topics/while"} <= documents.keys()
    assert not any("/test" in name or "site-packages" in name for name in documents)
    assert list(documents) == sorted(documents)
    assert 5e6 < sum(map(len, documents.values())) < 2e7


def test_builtin_corpus_is_split_by_name():
    sources = open_sources(DataConfig())
    held = {name for name, _ in corpus_documents() if held_out(name, 5)}
    assert len(sources.validation) == len(held)
    assert set(read(sources.train)).isdisjoint(text for text in read(sources.validation) if len(text) > 200)


def test_streaming_the_builtin_corpus_warns_that_it_is_ignored():
    with pytest.warns(UserWarning, match="--streaming is ignored"):
        open_sources(DataConfig(streaming=True, max_train_samples=1))


def with_readme(folder, metadata):
    """A data set of one file, and what its README.md says of it."""
    write(folder, "jsonl")
    (folder / "README.md").write_text(f"---\n{metadata}\n---\n")
    return {"dataset_name": str(folder)}


def bad_file(folder, name, content):
    file = folder / name
    file.write_bytes(content)
    return {"train_file": str(file)}


BAD = {
    "missing": (lambda d: {"train_file": f"{d}/none.txt"}, "--train_file .*none.txt does not exist"),
    "missing validation": (
        lambda d: bad_file(d, "a.txt", b"x") | {"validation_file": f"{d}/none.txt"},
        "--validation_file .*none.txt does not exist",
    ),
    "no match": (lambda d: {"train_file": f"{d}/*.txt"}, r"--train_file .*\*.txt matches no file"),
    "folder": (lambda d: {"train_file": str(d)}, "is a folder: name its files"),
    "empty": (lambda d: bad_file(d, "a.txt", b""), "a.txt is empty"),
    "empty json": (lambda d: bad_file(d, "a.jsonl", b""), "a.jsonl is empty"),
    "blank": (lambda d: bad_file(d, "a.txt", b" \n\n \n"), "a.txt holds no text"),
    "blank rows": (lambda d: bad_file(d, "a.jsonl", b'{"text": ""}\n{"text": " "}'), "a.jsonl holds no text"),
    "not utf-8": (lambda d: bad_file(d, "a.txt", b"caf\xe9 au lait"), r"a.txt is not UTF-8 text \(byte 3\)"),
    "broken json": (lambda d: bad_file(d, "a.jsonl", b'{"text": "a"}\n{"text": "b'), "a.jsonl, row 2, is not JSON"),
    "broken parquet": (lambda d: bad_file(d, "a.parquet", b"PAR1 no more"), "a.parquet cannot be read as parquet"),
    "other kind": (lambda d: bad_file(d, "a.pdf", b"text\na\nb"), "a.pdf is none of .txt, .json, .jsonl, .csv, .tsv"),
    "one document": (lambda d: bad_file(d, "a.txt", b"word" * 99), "a.txt holds one document.*--validation_file"),
    "one row": (
        lambda d: bad_file(d, "a.jsonl", b'{"text": "alone"}'),
        "a.jsonl holds one document.*--validation_file",
    ),
    "no text column": (
        lambda d: bad_file(d, "a.jsonl", b'{"a": "x", "b": "y", "c": 1}\n'),
        "a.jsonl has no column 'text' among a, b, c",
    ),
    "numbers only": (lambda d: bad_file(d, "a.jsonl", b'{"text": 1}\n{"text": 2}'), "a.jsonl has no column 'text'"),
    "broken stream": (
        lambda d: bad_file(d, "a.jsonl", b'{"text": "a') | {"streaming": True},
        "a.jsonl cannot be read as json",
    ),
    "stream without text": (
        lambda d: bad_file(d, "a.jsonl", b'{"a": "x", "b": "y"}\n') | {"streaming": True},
        "a.jsonl has no column 'text' among a, b",
    ),
    "null": (lambda d: bad_file(d, "a.json", b"null"), "a.json holds no rows with text: write"),
    "scalar": (lambda d: bad_file(d, "a.json", b"3"), "a.json holds no rows with text"),
    "list of scalars": (lambda d: bad_file(d, "a.json", b"[1, 2]"), "a.json holds no rows with text"),
    "list of one scalar": (lambda d: bad_file(d, "a.json", b'[{"text": "a"}, 3]'), "a.json cannot be read as json"),
    "empty list": (lambda d: bad_file(d, "a.json", b"[]"), "a.json holds no rows with text"),
    "nested": (
        lambda d: bad_file(d, "a.jsonl", b'{"text": "a", "b": ' + b"[" * 20000 + b"]" * 20000 + b"}\n"),
        "a.jsonl nests lists and objects more than 64 deep",
    ),
    "no data set": (lambda d: {"dataset_name": f"{d}/nothing"}, "--dataset_name .*nothing is neither a folder"),
    "part of a data set": (
        lambda d: with_readme(d, "dataset_info: {splits: [{name: train, num_examples: 61}]}"),
        "--dataset_name .* other splits or row counts than its README.md states.* or name its files",
    ),
    "data set without a split": (
        lambda d: with_readme(d, "dataset_info: {splits: [{name: train}, {name: test}]}"),
        "--dataset_name .* other splits or row counts than its README.md states.* or name its files",
    ),
    "several configurations": (
        lambda d: with_readme(d, "configs: [{config_name: de, data_files: t*}, {config_name: en, data_files: t*}]"),
        r"--dataset_name .* has several configurations: name one of \['de', 'en'\] \(dataset_config_name\)",
    ),
    "stream without validation": (
        lambda d: bad_file(d, "a.txt", b"x") | {"streaming": True, "validation_split_percentage": 1e-9},
        "--streaming found no document to hold out.*--validation_file",
    ),
}


def test_a_data_set_replaced_by_files_of_the_same_time_is_read_anew(tmp_path):
    (tmp_path / "set").mkdir()
    for word in ("alpha", "omega"):
        file = write(tmp_path, "jsonl", [f"{word} {index}" for index in range(60)])
        os.utime(file, (1, 1))
        os.replace(file, tmp_path / "set" / "train.jsonl")
        sources = open_sources(DataConfig(dataset_name=str(tmp_path / "set")))
        assert read(sources.train)[0].startswith(word)


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_told_in_one_sentence(tmp_path, case):
    make, message = BAD[case]
    with pytest.raises(ValueError, match=message) as caught:
        open_sources(DataConfig(**make(tmp_path)))
    assert "\n" not in str(caught.value)


def test_files_of_several_kinds_are_refused(tmp_path):
    write(tmp_path, "txt"), write(tmp_path, "jsonl")
    with pytest.raises(ValueError, match="files of several kinds"):
        open_sources(DataConfig(train_file=str(tmp_path / "texts.*")))


def test_a_file_without_read_permission_is_named(tmp_path, monkeypatch):
    options = bad_file(tmp_path, "a.txt", b"secret")
    # The tests may run as a superuser, who may read every file.
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(ValueError, match="a.txt cannot be read: check its permissions"):
        open_sources(DataConfig(**options))


@pytest.mark.parametrize(
    "options, message",
    [
        ({"dataset_name": "x", "train_file": "y"}, "--dataset_name and --train_file"),
        ({"dataset_config_name": "x"}, "--dataset_config_name needs a"),
        ({"document_boundary": "keep"}, "--document_boundary is reset or carry"),
        ({"block_size": 1}, "--block_size must be at least 2"),
    ],
)
def test_values_that_make_no_sense_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        DataConfig(**options)


def test_a_corrupt_parquet_stream_is_told_in_one_sentence(tmp_path):
    file = tmp_path / "texts.parquet"
    Dataset.from_dict({"text": [f"{index} " * 50 for index in range(5000)]}).to_parquet(file)
    content = bytearray(file.read_bytes())
    content[100:5100] = bytes(5000)
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"--train_file .*texts.parquet cannot be read as parquet, write it again"):
        open_sources(DataConfig(train_file=str(file), streaming=True))


@pytest.mark.parametrize("name", ["a\nb", "~nobody/data", "a/b/c", "missing/folder/"])
def test_a_name_that_no_data_set_can_have_is_one_line(name):
    with pytest.raises(ValueError, match=r"^--dataset_name [^\n]*is neither a folder nor a data set.s name"):
        open_sources(DataConfig(dataset_name=name))
