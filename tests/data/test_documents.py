"""Sources: which documents a flag gives, which are held out, and the errors for bad input."""

import json
import os

import pytest
from document_files import write

from hope_hf.data.config import DataConfig
from hope_hf.data.documents import corpus_documents, held_out, open_sources, split_documents

TEXTS = [f"Document {index}: " + "words and more words. " * (index % 5 + 1) for index in range(60)]


def jsonl(folder, texts=TEXTS, column="text"):
    file = folder / "texts.jsonl"
    file.write_text("\n".join(json.dumps({column: text}) for text in texts))
    return str(file)


def read(documents):
    return [row["text"].strip() for row in documents]


both = pytest.mark.parametrize("streaming", [False, True])


@both
@pytest.mark.parametrize("kind", ["txt", "jsonl", "parquet"])
def test_every_kind_of_file_gives_the_same_split(tmp_path, kind, streaming):
    file = write(tmp_path / f"texts.{kind}", TEXTS)
    sources = open_sources(DataConfig(train_file=file, streaming=streaming, validation_split_percentage=20))
    train, held = read(sources.train), read(sources.validation)
    assert sorted(train + held) == sorted(text.strip() for text in TEXTS)
    assert 0 < len(held) < len(train)
    if kind != "txt":
        assert set(held) == {text.strip() for text in TEXTS if held_out(text, 20)}


@both
def test_validation_file_leaves_all_documents_to_training(tmp_path, streaming):
    held = write(tmp_path / "held.txt", ["only this"])
    sources = open_sources(DataConfig(train_file=jsonl(tmp_path), validation_file=held, streaming=streaming))
    assert len(read(sources.train)) == len(TEXTS) and read(sources.validation) == ["only this"]


@both
def test_sample_limits_count_documents_after_the_split(tmp_path, streaming):
    limits = {"validation_split_percentage": 20, "max_train_samples": 7, "max_eval_samples": 2}
    sources = open_sources(DataConfig(train_file=jsonl(tmp_path), streaming=streaming, **limits))
    assert len(read(sources.train)) == 7 and len(read(sources.validation)) == 2
    assert not any(held_out(row["text"], 20) for row in sources.train)


@pytest.mark.parametrize("words", ["{body}\n\nTHE END", "A TITLE\n\n{body}"])
def test_one_long_text_is_parted_near_its_end_where_blank_lines_are_elsewhere(tmp_path, words):
    """A blank line after the title or before the last words would leave one side without text."""
    body = "\n".join(["some words of the book"] * 2_000)
    (tmp_path / "book.txt").write_text(words.format(body=body))
    sources = open_sources(DataConfig(train_file=str(tmp_path / "book.txt")))
    (train,), (held,) = read(sources.train), read(sources.validation)
    assert len(held) / (len(train) + len(held)) == pytest.approx(0.05, abs=0.001)


def test_line_ends_and_blank_lines_of_any_system_are_kept(tmp_path):
    (tmp_path / "play.txt").write_bytes(b"\xef\xbb\xbfone\r\n \r\ntwo\r\n\r\nthree\r\n")
    sources = open_sources(DataConfig(train_file=str(tmp_path / "play.txt"), validation_split_percentage=20))
    assert [row["text"] for row in sources.train] == ["one\r\n \r\ntwo\r\n\r\n"]
    assert [row["text"] for row in sources.validation] == ["three\r\n"]


def test_split_is_by_content_and_leaves_no_side_empty():
    keys = [f"key {index}" for index in range(400)]
    train, held = split_documents(keys, 10)
    assert sorted(train + held) == list(range(400)) and 20 < len(held) < 60
    # Another order or a removed document moves no other one.
    backwards = keys[:0:-1]
    _, held_backwards = split_documents(backwards, 10)
    expected = {keys[index] for index in held}
    assert {backwards[index] for index in held_backwards} == expected - {keys[0]}
    for percentage in (0.001, 99.999):
        assert [len(part) for part in split_documents(["a", "b", "a", "b", " "], percentage)] == [2, 2]
    assert split_documents(["a", "a"], 50)[1] == []


def test_builtin_corpus_has_sources_and_reference_but_no_tests_and_is_split_by_name():
    documents = dict(corpus_documents())
    assert {"asyncio/events.py", "json/decoder.py", "pydoc_data/topics/while"} <= documents.keys()
    assert not any("/test" in name or "site-packages" in name for name in documents)
    assert 5e6 < sum(map(len, documents.values())) < 2e7
    sources = open_sources(DataConfig())
    held = [text for name, text in documents.items() if held_out(name, 5)]
    assert sorted(sources.validation["text"]) == sorted(held)


def test_streaming_the_builtin_corpus_warns_that_it_is_ignored():
    with pytest.warns(UserWarning, match="--streaming is ignored"):
        open_sources(DataConfig(streaming=True, max_train_samples=1))


SPLITS = "dataset_info: {splits: [{name: train}, {name: test}]}"
CONFIGS = "configs: [{config_name: de, data_files: t*}, {config_name: en, data_files: t*}]"
# Files by name, the flags, and words of the error. `{d}` is their folder.
BAD = [
    ({}, {"train_file": "{d}/none.txt"}, "--train_file .*none.txt"),
    ({"a.txt": "x"}, {"train_file": "{d}/a.txt", "validation_file": "{d}/n.txt"}, "--validation_file .*n.txt"),
    ({}, {"train_file": "{d}"}, "--train_file .*folder"),
    ({"a.txt": " \n\n \n"}, {"train_file": "{d}/a.txt"}, "--train_file .*a.txt .*no text"),
    ({"a.txt": "word" * 99}, {"train_file": "{d}/a.txt"}, "a.txt .*one document.*--validation_file"),
    ({"a.txt": "x", "a.jsonl": '{"text": "x"}'}, {"train_file": "{d}/a.*"}, "several kinds"),
    ({}, {"dataset_name": "{d}/nothing"}, "--dataset_name .*nothing"),
    ({"README.md": SPLITS}, {"dataset_name": "{d}"}, "--dataset_name .*README.md"),
    ({"README.md": CONFIGS}, {"dataset_name": "{d}"}, r"\['de', 'en'\].*dataset_config_name"),
    ({"a.txt": "x"}, {"train_file": "{d}/a.txt", "streaming": True}, "--streaming .*--validation_file"),
    ({}, {"dataset_name": "a/b/c"}, "--dataset_name a/b/c"),
    ({}, {"dataset_name": "x", "train_file": "y"}, "--dataset_name and --train_file"),
]


@pytest.mark.parametrize("files, flags, words", BAD)
def test_bad_input_is_told_in_one_sentence(tmp_path, files, flags, words):
    for name, content in files.items():
        if name == "README.md":
            jsonl(tmp_path)
            content = f"---\n{content}\n---\n"
        (tmp_path / name).write_text(content)
    options = {}
    for name, value in flags.items():
        options[name] = value.format(d=tmp_path) if isinstance(value, str) else value
    with pytest.raises(ValueError, match=words) as caught:
        open_sources(DataConfig(**options))
    assert "\n" not in str(caught.value)


def test_a_data_set_replaced_by_files_of_the_same_time_is_read_anew(tmp_path):
    (tmp_path / "set").mkdir()
    for word in ("alpha", "omega"):
        file = jsonl(tmp_path, [f"{word} {index}" for index in range(60)])
        os.utime(file, (1, 1))
        os.replace(file, tmp_path / "set" / "train.jsonl")
        sources = open_sources(DataConfig(dataset_name=str(tmp_path / "set")))
        assert read(sources.train)[0].startswith(word)


def test_every_file_of_a_data_set_is_read_whatever_its_name(tmp_path):
    """Also those whose plain names are others' names, and those in a folder that is a link."""
    folder = tmp_path / "set [1]"
    write(folder / "train" / "a[1].jsonl", ["one"])
    write(folder / "train" / "a_1_.jsonl", ["two"])
    write(tmp_path / "elsewhere" / "a?.jsonl", ["three"])
    (folder / "train" / "linked").symlink_to(tmp_path / "elsewhere")
    (folder / "train" / "linked" / "back").symlink_to(folder)
    write(folder / "validation" / "a.jsonl", ["four"])
    sources = open_sources(DataConfig(dataset_name=str(folder)))
    assert sorted(read(sources.train)) == ["one", "three", "two"] and read(sources.validation) == ["four"]


@pytest.mark.parametrize(
    "names, words",
    [
        (["train.txt", "validation.txt"], "each line of validation.txt is a document"),
        (["train-1.jsonl", "train-2.jsonl", "train-3.csv", "LICENSE.txt"], "train-2.jsonl and train-3.csv, and one"),
    ],
)
def test_what_datasets_makes_of_a_folder_is_said(tmp_path, recwarn, names, words):
    for name in names:
        write(tmp_path / name, TEXTS[:9])
    with pytest.warns(UserWarning, match=words):
        open_sources(DataConfig(dataset_name=str(tmp_path)))
    (tmp_path / "README.md").write_text(f"---\nconfigs:\n- config_name: a\n  data_files: {names[0]}\n---\n")
    recwarn.clear()
    open_sources(DataConfig(dataset_name=str(tmp_path)))
    assert not [warning for warning in recwarn if warning.category is UserWarning]


def test_rows_of_a_data_set_without_text_are_counted(tmp_path):
    write(tmp_path / "train.jsonl", [*TEXTS, None, None])
    with pytest.warns(UserWarning, match=f"--dataset_name {tmp_path}: 2 of 62 rows cannot be read or hold no text"):
        sources = open_sources(DataConfig(dataset_name=str(tmp_path)))
    assert len(sources.train) + len(sources.validation) == 60


def test_a_validation_file_that_is_trained_on_is_named(tmp_path):
    train = [write(tmp_path / name, TEXTS) for name in ("a.jsonl", "b.jsonl")]
    with pytest.warns(UserWarning, match="--validation_file .*b.jsonl is also read by --train_file"):
        open_sources(DataConfig(train_file=train, validation_file=str(tmp_path / "[b].jsonl")))


def test_a_file_without_read_permission_is_named(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("secret")
    # The tests may run as a superuser, who may read every file.
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(ValueError, match="a.txt .*permissions"):
        open_sources(DataConfig(train_file=str(tmp_path / "a.txt")))
