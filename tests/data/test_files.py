"""Local files: their names, their forms, and the cache of what was read of them."""

import gzip
import json
import os
import shutil
from itertools import cycle
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet
import pytest
from datasets import Dataset, DatasetDict
from datasets.distributed import split_dataset_by_node
from document_files import write

from hope_hf.data import find_files, load_files, open_sources, passing, text_files
from hope_hf.data.config import DataConfig
from hope_hf.data.document_file import CODECS
from hope_hf.data.mixture import Corpus

# Each would be another file, several files or none if it were read as a pattern or as a URL.
NAMES = ["data[1]", "data?", "data*", "zip::data1", "data%31", "http:data1", "~data1", "[a", "file:", " data1 ", "ü#&"]
FOLDERS = ["we[ir]d", "w*", "we?rd", "simplecache::weird"]
KINDS = ["txt", "json", "jsonl", "csv", "tsv", "parquet", "arrow"]

both = pytest.mark.parametrize("streaming", [False, True])


def texts_of(name: str | list[str], streaming: bool = False, **options) -> list[str | None]:
    rows = load_files(find_files(name, "--train_file"), "--train_file", streaming, **options)
    return [row["text"] and row["text"].strip() for row in rows]


@both
def test_a_name_that_exists_is_that_file_whatever_its_characters(tmp_path, streaming):
    for kind in KINDS:
        write(tmp_path / "weird" / f"data1.{kind}", ["another file"])
    for name, kind in zip(NAMES, cycle(KINDS)):
        assert texts_of(write(tmp_path / f"{name}.{kind}", [name]), streaming) == [name.strip()]
    for folder in FOLDERS:
        assert texts_of(write(tmp_path / folder / "data[1].jsonl", [folder]), streaming) == [folder]
        for split in ("train", "validation"):
            write(tmp_path / folder / "set" / f"{split}-0[1].parquet", [split])
        sources = open_sources(DataConfig(dataset_name=str(tmp_path / folder / "set"), streaming=streaming))
        assert [row["text"] for row in sources.train] == ["train"]
        assert [row["text"] for row in sources.validation] == ["validation"]


@pytest.mark.parametrize("folder", FOLDERS)
def test_what_follows_a_folder_that_exists_may_be_a_pattern(tmp_path, monkeypatch, folder):
    write(tmp_path / "weird" / "data9.txt", ["another folder"])
    for number in (1, 2):
        write(tmp_path / folder / f"data{number}.txt", [str(number)])
    assert texts_of(str(tmp_path / folder / "data[0-9].txt")) == ["1", "2"]
    assert texts_of(str(tmp_path / folder / "**" / "*.txt")) == ["1", "2"]
    monkeypatch.chdir(tmp_path / folder)
    assert texts_of("data?.txt") == texts_of("*.txt", streaming=True) == ["1", "2"]


def test_a_file_of_several_names_is_read_once(tmp_path, monkeypatch, recwarn):
    file = write(tmp_path / "texts" / "a.jsonl", ["a", "b"])
    monkeypatch.chdir(tmp_path)
    assert texts_of([file, "texts/a.jsonl", "texts/../texts/*.jsonl"]) == ["a", "b"]
    assert not recwarn
    (tmp_path / "texts" / "link.jsonl").symlink_to("a.jsonl")
    (tmp_path / "more").symlink_to("texts")
    with pytest.warns(UserWarning, match="more/link.jsonl is the file more/a.jsonl by another name.* 2 more"):
        assert texts_of("**/*.jsonl") == ["a", "b"]


def test_a_compressed_copy_beside_its_file_is_named(tmp_path):
    file = write(tmp_path / "a.jsonl", ["a"])
    Path(f"{file}.gz").write_bytes(gzip.compress(Path(file).read_bytes()))
    with pytest.warns(UserWarning, match="a.jsonl and .*a.jsonl.gz are both read"):
        assert texts_of(str(tmp_path / "*")) == ["a", "a"]


# By name: the content of a file, and its texts.
FORMS = {
    "columns of pandas.json": ('{"text": {"0": "a", "1": "b"}, "id": {"0": 1, "1": 2}}', ["a", "b"]),
    "columns.json": ('{"text": ["a", "b"], "meta": [{"id": 1}, {"id": 2}]}', ["a", "b"]),
    "split of pandas.json": ('{"columns":["id","text"],"index":[0,1],"data":[[1,"a"],[2,"b"]]}', ["a", "b"]),
    "split without an index.json": ('{"columns":["text"],"data":[["a"]]}', ["a"]),
    "strings.json": ('["a", "b"]', ["a", "b"]),
    "list.json": (' \n[\n  {"text": "a"},\n  {"id": 3, "text": "b"}\n]\n', ["a", "b"]),
    "several lines.json": ('{\n  "text": "a",\n "n": {\n}\n}\n{\n  "text":\n "b"\n}', ["a", "b"]),
    "two on a line.json": ('\ufeff{"text": "a"} {"text": "b"}\r\n', ["a", "b"]),
    "deep.jsonl": ('{"text": "a", "b": ' + "[" * 200 + "]" * 200 + "}\n", ["a"]),
    "other types.jsonl": ('{"text": "a", "id": 1}\n{"id": "x", "text": "2024-01-01"}', ["a", "2024-01-01"]),
    "dates are no text.jsonl": ('{"page": "a page", "day": "2024-01-01T10:00:00Z"}\n', ["a page"]),
    "half a pair.jsonl": ('{"text": "one"}\n{"text": "bad \\ud800 text"}\n', ["one", "bad ? text"]),
    "lines in quotes.csv": (
        '\ufeffday,body,n\n2024-01-01,"first, in\ntwo lines",1\n2024-01-02,NA,2\n\n',
        ["first, in\ntwo lines", "NA"],
    ),
    "numbers.csv": ("title,text\na,1\nb,2\n", ["1", "2"]),
    "a comma in its name.csv": ('"what, and why"\none\n', ["one"]),
}


@both
@pytest.mark.parametrize("name", FORMS)
def test_a_file_may_have_any_usual_form(tmp_path, name, streaming):
    content, texts = FORMS[name]
    (tmp_path / name).write_text(content)
    assert texts_of(str(tmp_path / name), streaming) == texts


@pytest.mark.parametrize("kind", [pa.string_view(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())])
def test_a_parquet_column_of_strings_of_any_kind_is_text(tmp_path, kind):
    pyarrow.parquet.write_table(pa.table({"page": pa.array(["a", "b"]).cast(kind)}), tmp_path / "a.parquet")
    rows = load_files([str(tmp_path / "a.parquet")], "--train_file")
    assert rows["text"][:] == ["a", "b"] and rows.features["text"].dtype == "string"


def test_the_file_format_of_arrow_is_read_like_its_stream_format(tmp_path):
    table = pa.table({"text": ["one", "two"]})
    with pa.ipc.new_file(str(tmp_path / "b.arrow"), table.schema) as writer:
        writer.write_table(table)
    assert texts_of(str(tmp_path / "b.arrow")) == ["one", "two"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_compressed_file_is_read_like_the_file(tmp_path, kind):
    texts = ["one, two", "é\tthree", 'four "five"']
    plain = tmp_path / f"a[1].{kind}"
    write(plain, texts)
    content = plain.read_bytes()
    for ending, codec in CODECS.items():
        with pa.CompressedOutputStream(f"{plain}{ending}", codec) as file:
            file.write(content)
        assert texts_of(f"{plain}{ending}", streaming=ending == ".gz") == texts
    if kind not in ("parquet", "arrow"):
        # gzip allows several streams one after another.
        several = tmp_path / f"b.{kind}.gz"
        several.write_bytes(gzip.compress(content) + gzip.compress(b"\n"))
        assert texts_of(str(several)) == texts


def test_a_column_is_chosen_by_its_name(tmp_path):
    name = write(tmp_path / "b.csv", ["1", "2"], title=["a", "b"])
    assert texts_of(name, column="title") == ["a", "b"]
    with pytest.raises(ValueError, match="b.csv .*'x'"):
        texts_of(name, column="x")


def test_ranks_share_the_documents_of_a_stream_and_not_its_files(tmp_path):
    """Of three short files and a long one, each of two ranks would else read files of its own."""
    names = [write(tmp_path / "a.jsonl", ["a0", "a1"]), write(tmp_path / "b.jsonl", [f"b{i}" for i in range(40)])]
    stream = load_files(names, "--train_file", streaming=True)
    for documents, count in ((stream, 42), (stream.take(11), 11)):
        first, second = (len(list(split_dataset_by_node(documents, rank, 2))) for rank in (0, 1))
        assert first + second == count and 0 <= first - second <= 1


EMPTY = {
    "parquet": None, "arrow": None, "json": '{"text": {}}', "jsonl": " " * 3000 + "\n", "csv": "id,text\n",
    "tsv": "\n", "txt": "",
}  # fmt: skip


@pytest.mark.parametrize("kind", EMPTY)
def test_files_without_rows_are_left_out_and_counted(tmp_path, kind):
    empty = tmp_path / f"a.{kind}"
    if EMPTY[kind] is None:
        write(empty, [])
    else:
        empty.write_text(EMPTY[kind])
    write(tmp_path / f"m.{kind}", ["some text", "more"])
    with pytest.warns(UserWarning, match=f"{empty.name}.* 1 of 2 files"):
        assert texts_of(str(tmp_path / f"*.{kind}")) == ["some text", "more"]
    with pytest.raises(ValueError, match=f"--train_file .*{empty.name}"):
        texts_of(str(empty))


ROWS = {
    "a.jsonl": (b'{"text": "a"\n{"text": 1}\n[1]\n{"n": 1}\n{"text": null}\n\n{"text": "b\xff"}\n{"text": "c"}\n', 6),
    "a.json": (b'[{"text": "c"}, {"text": 1}, 2, {}]', 3),
    "a.csv": (b"id,text\n1\n2,c\n3,d,e\n", 2),
    "a.parquet": (None, 1),
}


@both
@pytest.mark.parametrize("name", ROWS)
def test_bad_rows_are_an_error_or_are_skipped_and_counted(tmp_path, name, streaming):
    content, bad = ROWS[name]
    path = write(tmp_path / name, ["c", None])
    if content:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"--train_file {path}"):
        texts_of(path, streaming)
    with pytest.warns(UserWarning, match=f"--train_file: {bad} of {bad + 1} rows"):
        texts = texts_of(path, streaming, on_bad_rows="skip")
    assert [text for text in texts if text is not None] == ["c"]
    with pytest.warns(UserWarning, match="corpus web: files"):
        documents, dropped = passing(Corpus("web", files=path, on_bad_rows="skip"))
    assert documents["text"][:] == ["c"] and dropped == {"blank": bad}


# By name: the content of a file, and words that the error has behind the name.
BROKEN = {
    "latin-1 in.jsonl": ('{"text": "café"}\n'.encode("latin-1"), "UTF-8"),
    "latin-1.txt": (b"x" * 99_999 + b"\xe9 ", "UTF-8"),
    "latin-1 behind a mark.txt": (b"\xef\xbb\xbfab\xe9 ", "UTF-8"),
    "no json.jsonl": (b'{"text": "a"}\n{"text": "b', "row 2"),
    "numbers in a list.json": (b"[1, 2]", "row 1"),
    "one of a list.json": (b'[{"text": "a"}, 3]', "row 2"),
    "list without end.json": (b'[{"text": "a"},', "json"),
    "too deep.jsonl": (b'{"text": "a", "b": ' + b"[" * 20_000 + b"]" * 20_000 + b"}\n", "row 1"),
    "a number later.jsonl": (b'{"text": "a"}\n' * 1_000 + b'{"text": 1}', "row 1,001, .*'text'.*on_bad_rows"),
    "several columns.jsonl": (b'{"a": "x", "b": "y", "c": 1}\n', "'text' .*a, b, c"),
    "numbers and dates.tsv": (b"id\tday\n1\t2024-01-01\n", "'text' .*day, id"),
    "semicolons.csv": (b"id;text\n1;text\n", "id;text"),
    "tabs.csv": (b"id\ttext\n1\ttext\n", "tab"),
    "a field too many.csv": (b"id,text\n1,a\n2,b\n3,c,d\n", "row 3, .*3 fields"),
    "cut off.jsonl.gz": (gzip.compress(b'{"text": "a"}')[:-9], "json"),
    "archive.jsonl.zip": (b"PK", "unpack"),
    "utf-16 without a mark.txt": ("some words\nand more".encode("utf-16-le"), "NUL"),
    "a tail of a disk that failed.txt": (b"some words\n" + b"\0" * 99_999, "NUL"),
    "utf-16 without a mark.csv": ("text\nwords\n".encode("utf-16-le"), "NUL"),
    "two columns of a name.csv": (b"text,text\na,b\n", "several columns 'text'"),
    "other.pdf": (b"text", ".txt, .json"),
    "broken.arrow": (b"ARROW no more", "arrow"),
    "broken.parquet": (b"PAR1 no more", "parquet"),
    "empty.jsonl": (b"", "empty"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_file_that_cannot_be_read_is_named_alone_and_in_a_mixture(tmp_path, name):
    content, words = BROKEN[name]
    broken = tmp_path / name
    broken.write_bytes(content)
    for streaming in (False, True):
        with pytest.raises(ValueError, match=f"--train_file {broken}.*{words}") as caught:
            texts_of(str(broken), streaming)
        assert "\n" not in str(caught.value)
    files = [str(broken)]
    if content:
        # A whole file comes first where the file is one of several.
        files.insert(0, write(tmp_path / "0.txt", ["a whole file"]))
    with pytest.raises(ValueError, match=f"corpus web: files {broken}.*{words}"):
        passing(Corpus("web", files=files))


def test_all_files_have_the_column_of_the_first(tmp_path):
    (tmp_path / "b.jsonl").write_text('{"page": "a"}\n')
    with pytest.raises(ValueError, match="--train_file .*b.jsonl .*'text' .*page"):
        texts_of([write(tmp_path / "a.jsonl", ["a"]), str(tmp_path / "b.jsonl")])


@both
def test_a_corrupt_parquet_is_named(tmp_path, streaming):
    path = write(tmp_path / "a.parquet", [f"{index} " * 50 for index in range(5000)])
    content = bytearray((tmp_path / "a.parquet").read_bytes())
    content[100:5100] = bytes(5000)
    (tmp_path / "a.parquet").write_bytes(content)
    with pytest.raises(ValueError, match="--train_file .*a.parquet.* parquet"):
        texts_of(path, streaming)


@both
@pytest.mark.parametrize("flag", ["train_file", "dataset_name"])
def test_a_folder_of_save_to_disk_is_read(tmp_path, flag, streaming):
    texts = [f"text {number}" for number in range(40)]
    datasets.disable_progress_bar()
    one = tmp_path / "one[1]"
    Dataset.from_dict({"text": texts, "id": range(40)}).save_to_disk(one, num_shards=3)
    sources = open_sources(DataConfig(**{flag: str(one)}, streaming=streaming))
    train = [row["text"] for row in sources.train]
    held = sources.validation["text"][:]
    assert held and sorted(train + held) == sorted(texts)
    several = tmp_path / "sev::eral"
    splits = DatasetDict(train=Dataset.from_dict({"text": texts}), validation=Dataset.from_dict({"text": ["held"]}))
    splits.save_to_disk(tmp_path / "several")
    (tmp_path / "several").rename(several)
    flags = {flag: str(several)}
    if flag == "train_file":
        flags["validation_file"] = str(several)
    sources = open_sources(DataConfig(**flags, streaming=streaming))
    assert [row["text"] for row in sources.train] == texts
    assert sources.validation["text"][:] == ["held"]


def test_a_saved_folder_without_the_split_or_a_file_is_named(tmp_path):
    folder = tmp_path / "sets"
    DatasetDict(train=Dataset.from_dict({"text": ["a"]})).save_to_disk(folder)
    with pytest.raises(ValueError, match="--validation_file .*sets .*'validation'"):
        find_files(str(folder), "--validation_file", "validation")
    for file, content in (
        ("train/state.json", '{"_data_files": [{"filename": "../a.arrow"}]}'),
        ("train/state.json", '{"_data_files": [{"filename": 3}]}'),
        ("train/state.json", "["),
        ("dataset_dict.json", "{}"),
    ):
        (folder / file).write_text(content)
        with pytest.raises(ValueError, match=f"--train_file .*{file}"):
            find_files(str(folder), "--train_file")


def test_what_was_read_is_found_in_the_cache_until_a_file_changes(tmp_path):
    name = write(tmp_path / "a.txt", ["first"])
    first = load_files([name], "")
    (file,) = first.cache_files
    state = os.stat(file["filename"])
    again = load_files([name], "")
    # The fingerprint names the tokens in the cache of the next process.
    assert again.cache_files == [file] and again._fingerprint == first._fingerprint
    assert os.stat(file["filename"]) == state
    os.utime(name, ns=(state.st_mtime_ns, state.st_mtime_ns + 1))
    assert load_files([name], "").cache_files != [file]


def test_a_file_of_the_same_size_and_time_is_not_taken_for_the_old_one(tmp_path):
    name = tmp_path / "a.jsonl"
    other = tmp_path / "b.jsonl"
    for file, word in ((name, "alpha"), (other, "omega")):
        file.write_text(json.dumps({"text": word}))
        os.utime(file, (1, 1))
    assert texts_of(str(name)) == ["alpha"]
    shutil.copy2(other, name)
    assert os.stat(name).st_mtime == 1
    assert texts_of(str(name)) == ["omega"]


def test_a_cache_that_cannot_be_written_is_replaced_for_the_run(tmp_path, monkeypatch):
    name = write(tmp_path / "a.txt", ["a", "b"])
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "file" / "cache")
    with pytest.warns(UserWarning, match="file/cache .*HF_DATASETS_CACHE"):
        assert texts_of(name) == ["a", "b"]
    # Said once, and the replacement serves all.
    assert texts_of(name) == ["a", "b"]


def test_a_text_of_usual_size_is_one_document_and_a_huge_one_is_cut_at_blank_lines(tmp_path, monkeypatch):
    for name, size in (("LONGEST", 4_000), ("PART", 500), ("_LONGEST_LINE", 64)):
        monkeypatch.setattr(text_files, name, size)
    paragraphs = [f"Paragraph {number} with words, more or less.\nAnd a line.\n\n" for number in range(300)]
    usual = "".join(paragraphs[:60])
    huge = "".join(paragraphs)
    assert len(usual) < 4_000
    path = tmp_path / "a.txt"
    path.write_text(f"{usual}<|endoftext|>\n{huge}<|endoftext|>\nlast")
    with path.open("rb") as stream:
        first, *parts, last = text_files.documents_of_text(stream)
    assert (first, last) == (usual, "last")
    assert "".join(parts) == huge and all(part.endswith("\n\n") for part in parts)
    assert all(500 <= len(part) <= 1_000 for part in parts[:-1])
