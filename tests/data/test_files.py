"""Local files: their names, their forms, and the cache of what was read of them."""

import csv
import gzip
import json
import os
import re
import shutil
from itertools import islice
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet
import pytest
from datasets import Dataset, DatasetDict, IterableDataset
from datasets.distributed import split_dataset_by_node

from hope_hf.data import json_files, plain_name, text_files
from hope_hf.data.compressed import CODECS
from hope_hf.data.config import DataConfig
from hope_hf.data.corpora import passing
from hope_hf.data.documents import open_sources
from hope_hf.data.files import find_files, load_files
from hope_hf.data.loader import _is_a_place_in
from hope_hf.data.mixture import Corpus

# Each would be another file, several files or none if it were read as a pattern or as a URL.
NAMES = ["data[1]", "data?", "data*", "zip::data1", "data%31", "http:data1", "~data1", "[a", "file:", " data1 ", "ü#&"]
FOLDERS = ["we[ir]d", "w*", "we?rd", "simplecache::weird"]
KINDS = ["txt", "json", "jsonl", "csv", "parquet", "arrow"]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def write(path: Path, texts: list[str], **columns) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    table = {"text": texts, **columns}
    rows = [dict(zip(table, row, strict=True)) for row in zip(*table.values(), strict=True)]
    match path.suffix:
        case ".txt":
            path.write_text("\n<|endoftext|>\n".join(texts))
        case ".json":
            path.write_text(json.dumps(rows))
        case ".jsonl":
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        case ".csv" | ".tsv":
            lines = [table, *zip(*table.values(), strict=True)]
            with open(path, "w", newline="") as file:
                csv.writer(file, delimiter="\t" if path.suffix == ".tsv" else ",").writerows(lines)
        case ".parquet":
            with open(path, "wb") as file:
                pyarrow.parquet.write_table(pa.table(table), file)
        case ".arrow":
            with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, pa.table(table).schema) as stream:
                stream.write_table(pa.table(table))
    return str(path)


def texts_of(name: str | list[str], streaming: bool = False, split: str = "train") -> list[str | None]:
    rows = load_files(find_files(name, "--train_file", split), "--train_file", streaming)
    return [row["text"] and row["text"].strip() for row in rows]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("streaming", [False, True])
def test_a_name_that_exists_is_that_file_whatever_its_characters(tmp_path, kind, streaming):
    for folder in ["weird", *FOLDERS]:
        write(tmp_path / folder / f"data1.{kind}", ["another file"])
    for name in NAMES:
        assert texts_of(write(tmp_path / f"{name}.{kind}", [name]), streaming) == [name.strip()]
    for folder in FOLDERS:
        path = write(tmp_path / folder / f"data[1].{kind}", [folder])
        assert texts_of(path, streaming) == [folder]


@pytest.mark.parametrize("folder", FOLDERS)
def test_what_follows_a_folder_that_exists_may_be_a_pattern(tmp_path, monkeypatch, folder):
    write(tmp_path / "weird" / "data9.txt", ["another folder"])
    for number in (1, 2):
        write(tmp_path / folder / f"data{number}.txt", [str(number)])
    assert texts_of(str(tmp_path / folder / "data[0-9].txt")) == ["1", "2"]
    assert texts_of(str(tmp_path / folder / "**" / "*.txt")) == ["1", "2"]
    monkeypatch.chdir(tmp_path / folder)
    assert texts_of("data?.txt") == texts_of("*.txt", streaming=True) == ["1", "2"]
    assert texts_of("data2.txt") == ["2"]


def test_files_of_a_mixture_and_for_validation_are_named_exactly(tmp_path):
    write(tmp_path / "data1.jsonl", ["another file"])
    name = write(tmp_path / "data[1].jsonl", ["the first", "the second"])
    documents, _ = passing(Corpus("web", files=name))
    assert documents["text"][:] == ["the first", "the second"]
    sources = open_sources(DataConfig(train_file=name, validation_file=name))
    assert sources.validation["text"][:] == ["the first", "the second"]


@pytest.mark.parametrize("folder", FOLDERS)
@pytest.mark.parametrize("streaming", [False, True])
def test_a_data_set_folder_may_have_any_name(tmp_path, folder, streaming):
    write(tmp_path / "weird" / "train.parquet", ["another folder"])
    for split in ("train", "validation"):
        write(tmp_path / folder / "data" / f"{split}-0[1].parquet", [f"{folder} {split}"])
    sources = open_sources(DataConfig(dataset_name=str(tmp_path / folder), streaming=streaming))
    assert [row["text"] for row in sources.train] == [f"{folder} train"]
    assert [row["text"] for row in sources.validation] == [f"{folder} validation"]


def test_a_plain_name_stands_for_the_same_file_and_stays_the_same(tmp_path):
    name = write(tmp_path / "task[1].jsonl", ["a"])
    assert os.path.samefile(plain_name(name), name) and not set("[]*?") & set(plain_name(name))
    assert plain_name(plain_name(name)) == plain_name(name) == plain_name(name)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("kind", ["json", "jsonl", "parquet"])
def test_columns_beside_the_text_may_differ_between_files(tmp_path, kind, streaming):
    columns = [{"meta": [{"a": 1}], "id": [1], "day": ["2024-01-01"]}, {"meta": ["none"], "day": ["unknown"]}]
    for number, others in enumerate(columns):
        write(tmp_path / f"{number}.{kind}", [f"text {number}"], **others)
    assert texts_of(str(tmp_path / f"*.{kind}"), streaming) == ["text 0", "text 1"]


def test_values_beside_the_text_may_differ_within_a_file(tmp_path):
    rows = ['{"text": "a", "id": 1}', '{"id": "x", "text": "2024-01-01"}', '{"id": [{}], "text": ""}']
    (tmp_path / "a.jsonl").write_text("\n".join(rows))
    assert texts_of(str(tmp_path / "a.jsonl")) == ["a", "2024-01-01", ""]


def test_dates_are_neither_parsed_nor_taken_for_the_text(tmp_path):
    assert texts_of(write(tmp_path / "a.jsonl", ["2024-01-01", "2024-01-02"])) == ["2024-01-01", "2024-01-02"]
    (tmp_path / "b.jsonl").write_text('{"page": "a page", "day": "2024-01-01T10:00:00Z"}\n')
    assert texts_of(str(tmp_path / "b.jsonl")) == ["a page"]


@pytest.mark.parametrize("kind", [pa.string_view(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())])
def test_a_parquet_column_of_strings_of_any_kind_is_text(tmp_path, kind):
    pyarrow.parquet.write_table(pa.table({"page": pa.array(["a", "b"]).cast(kind)}), tmp_path / "a.parquet")
    rows = load_files([str(tmp_path / "a.parquet")], "--train_file")
    assert rows["text"][:] == ["a", "b"] and rows.features["text"].dtype == "string"


@pytest.mark.parametrize(
    "content",
    [
        '{"text": {"0": "a", "1": "b"}, "id": {"0": 1, "1": 2}}',
        '{"text": ["a", "b"], "id": [1, 2]}',
        '["a", "b"]',
        ' \n[\n  {"text": "a"},\n  {"id": 3, "text": "b"}\n]\n',
        '{\n  "text": "a"\n}\n{\n  "text":\n "b"\n}',
        '\ufeff{"text": "a"} {"text": "b"}\r\n',
    ],
)
def test_json_may_have_any_usual_form(tmp_path, monkeypatch, content):
    # Pieces smaller than an object.
    monkeypatch.setattr(json_files, "_BYTES", 4)
    (tmp_path / "a.json").write_text(content)
    assert texts_of(str(tmp_path / "a.json")) == ["a", "b"]


def compressed(path: Path, codec: str) -> str:
    target = Path(f"{path}{ {v: k for k, v in CODECS.items()}[codec] }")
    with pa.CompressedOutputStream(str(target), codec) as file:
        file.write(path.read_bytes())
    path.unlink()
    return str(target)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("kind", ["txt", "json", "jsonl", "csv", "tsv", "parquet", "arrow"])
@pytest.mark.parametrize("codec", ["gzip", "zstd", "bz2", "lz4"])
def test_a_compressed_file_is_read_like_the_file(tmp_path, kind, codec, streaming):
    texts = ["one, two", "é\tthree", 'four "five"']
    name = compressed(Path(write(tmp_path / f"a[1].{kind}", texts)), codec)
    assert texts_of(name, streaming) == texts
    if codec == "gzip" and kind != "parquet" and kind != "arrow":
        # gzip allows several streams one after another.
        Path(name).write_bytes(b"".join(map(gzip.compress, (gzip.decompress(Path(name).read_bytes()), b"\n"))))
        assert texts_of(name, streaming) == texts


@pytest.mark.parametrize("streaming", [False, True])
def test_the_text_of_a_csv_is_the_column_text_or_the_only_one_of_strings(tmp_path, streaming):
    (tmp_path / "a.csv").write_text('\ufeffday,body,n\n2024-01-01,"first, in\ntwo lines",1\n2024-01-02,NA,2\n\n')
    assert texts_of(str(tmp_path / "a.csv"), streaming) == ["first, in\ntwo lines", "NA"]
    (tmp_path / "b.csv").write_text("title,text\na,1\nb,2\n")
    assert texts_of(str(tmp_path / "b.csv"), streaming) == ["1", "2"]
    with pytest.raises(ValueError, match="a.csv has no column 'x' of strings among body, day, n"):
        load_files([str(tmp_path / "a.csv")], "--train_file", column="x")
    rows = load_files([str(tmp_path / "b.csv")], "--train_file", column="title")
    assert rows["text"][:] == ["a", "b"]
    (tmp_path / "c.csv").write_text("title,body\na,b\n")
    with pytest.raises(ValueError, match="c.csv has no column 'text' among body, title: name one with --text_c"):
        texts_of(str(tmp_path / "c.csv"))


@pytest.mark.parametrize("streaming", [False, True])
def test_several_names_are_read_one_after_another_each_file_once(tmp_path, streaming):
    names = [write(tmp_path / name, [name]) for name in ("b.jsonl", "a.txt", "c.csv")]
    write(tmp_path / "d.txt", ["d.txt"])
    found = texts_of([*names, str(tmp_path / "*.txt")], streaming)
    assert found == ["b.jsonl", "a.txt", "c.csv", "d.txt"]
    documents, _ = passing(Corpus("web", files=names))
    assert documents["text"][:] == found[:3]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_ranks_share_the_documents_of_a_stream_and_not_its_files(tmp_path, world_size):
    """Of three short files and a long one, each of two ranks would else read files of its own."""
    names = [write(tmp_path / "a.jsonl", ["a0", "a1"]), write(tmp_path / "b.jsonl", [f"b{i}" for i in range(40)])]
    stream = load_files(names, "--train_file", streaming=True)
    for documents, count in ((stream, 42), (stream.take(11), 11)):
        ranks = [split_dataset_by_node(documents, rank, world_size) for rank in range(world_size)]
        found = [[row["text"] for row in rank] for rank in ranks]
        assert sum(map(len, found)) == count and max(map(len, found)) - min(map(len, found)) <= 1


def test_both_formats_of_arrow_are_read(tmp_path):
    table = pa.table({"text": ["one", "two"]})
    for name, new in (("a.arrow", pa.ipc.new_stream), ("b.arrow", pa.ipc.new_file)):
        with new(str(tmp_path / name), table.schema) as writer:
            writer.write_table(table)
        assert texts_of(str(tmp_path / name)) == ["one", "two"]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_place_in_a_stream_of_an_earlier_version_is_refused(tmp_path, world_size):
    """There every file was a shard of its own."""
    names = [write(tmp_path / f"{name}.jsonl", [f"{name}{i}" for i in range(9)]) for name in "abc"]
    now = load_files(names, "--train_file", streaming=True)
    before = IterableDataset.from_generator(lambda paths: ({"text": path} for path in paths for _ in range(9)),
                                            gen_kwargs={"paths": names})  # fmt: skip
    now, before = (split_dataset_by_node(documents, 0, world_size) for documents in (now, before))
    for documents in (now, before):
        list(islice(documents, 5 if world_size == 3 else 12))
        beginning = split_dataset_by_node(load_files(names, "x", streaming=True), 0, world_size).state_dict()
        fits = _is_a_place_in(now, beginning, documents.state_dict())
        assert fits is (documents is now)


@pytest.mark.parametrize("name, head", [("a.csv", "id;text"), ("a.tsv", "id,text"), ("a.csv", "id\ttext")])
def test_columns_that_another_sign_separates_are_refused(tmp_path, name, head):
    (tmp_path / name).write_text(f"{head}\n{head}\n")
    with pytest.raises(ValueError, match="its only column is .*, so separate columns by commas in .csv"):
        texts_of(str(tmp_path / name))


def test_an_only_column_may_have_a_comma_in_its_name(tmp_path):
    (tmp_path / "a.csv").write_text('"what, and why"\none\n')
    assert texts_of(str(tmp_path / "a.csv")) == ["one"]


def test_columns_of_objects_beside_the_text_are_columns(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps({"text": ["a", "b"], "meta": [{"id": 1}, {"id": 2}]}))
    assert texts_of(str(tmp_path / "a.json")) == ["a", "b"]


def test_empty_files_among_others_are_left_out_and_counted(tmp_path):
    write(tmp_path / "a.txt", ["a"])
    for name in ("b.txt", "c.txt"):
        (tmp_path / name).write_text("")
    with pytest.warns(
        UserWarning, match="--train_file: .*b.txt and 1 more are empty and left out, 1 of 3 files are re"
    ):
        assert texts_of(str(tmp_path / "*.txt")) == ["a"]
    (tmp_path / "d.txt.gz").write_bytes(gzip.compress(b""))
    with pytest.warns(UserWarning, match="d.txt.gz is empty and left out, 1 of 2 files are read"):
        assert texts_of([str(tmp_path / "a.txt"), str(tmp_path / "d.txt.gz")]) == ["a"]
    with pytest.raises(ValueError, match="--train_file .*b.txt is empty: give a file with text"):
        texts_of([str(tmp_path / "b.txt"), str(tmp_path / "c.txt")])


def without_rows(kind: str, path: Path) -> None:
    """Write a file of a kind without rows, as programs write it."""
    nothing = pa.table({"text": pa.nulls(0)})
    if kind == "parquet":
        pyarrow.parquet.write_table(nothing, path)
    elif kind == "arrow":
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, nothing.schema) as writer:
            writer.write_table(nothing)
    else:
        kinds = {"list": "[ ]\n", "columns": '{"text": {}}', "line": "\n", "space": " " * 3000, "names": "id,text\n"}
        path.write_text(kinds[kind])


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize(
    ("kind", "ending"),
    [
        ("parquet", "parquet"), ("arrow", "arrow"), ("list", "json"), ("columns", "json"), ("line", "jsonl"),
        ("space", "jsonl"), ("names", "csv"), ("line", "tsv"),
    ],
)  # fmt: skip
def test_tables_without_rows_are_left_out_and_counted(tmp_path, kind, ending, first):
    without_rows(kind, tmp_path / f"{'a' if first else 'z'}.{ending}")
    path = write(tmp_path / f"m.{ending}", ["some text", "more"])
    names = str(tmp_path / f"*.{ending}")
    with pytest.warns(UserWarning, match="is empty and left out, 1 of 2 files are read"):
        assert texts_of(names) == ["some text", "more"]
    with pytest.warns(UserWarning, match="is empty and left out"):
        streamed = load_files(find_files(names, "--train_file"), "--train_file", streaming=True)
    assert [row["text"] for row in streamed] == ["some text", "more"]
    with pytest.warns(UserWarning, match="is empty and left out"):
        sources = open_sources(DataConfig(train_file=path, validation_file=names))
    assert sources.validation["text"][:] == ["some text", "more"]
    with pytest.warns(UserWarning, match="is empty and left out"):
        assert passing(Corpus("a", files=names))[0]["text"][:] == ["some text", "more"]
    empty = str(tmp_path / f"{'a' if first else 'z'}.{ending}")
    with pytest.raises(ValueError, match="holds no rows"):
        texts_of(empty)


BAD = {
    "a.jsonl": (b'{"text": "a"\n{"text": 1}\n[1]\n{"n": 1}\n{"text": null}\n\n{"text": "b\xff"}\n{"text": "c"}\n', 6),
    "a.json": (b'[{"text": "c"}, {"text": 1}, 2, {}]', 3),
    "a.csv": (b"id,text\n1\n2,c\n3,d,e\n", 2),
}


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("name", [*BAD, "a.parquet"])
def test_bad_rows_are_an_error_or_are_skipped_and_counted(tmp_path, name, streaming):
    content, bad = BAD.get(name, (None, 1))
    if content:
        (tmp_path / name).write_bytes(content)
    else:
        write(tmp_path / name, ["c", None])
    path = str(tmp_path / name)
    with pytest.raises(ValueError, match=f"--train_file {path}"):
        texts_of(path, streaming)
    options = {"streaming": streaming, "on_bad_rows": "skip"}
    for _ in range(2):
        # The second time from the cache.
        with pytest.warns(UserWarning, match=rf"--train_file: {bad} of {bad + 1} rows cannot be read or hold no text"):
            found = [row["text"] for row in load_files(find_files(path, "--train_file"), "--train_file", **options)]
        assert [text for text in found if text is not None] == ["c"]
    with pytest.warns(UserWarning, match="corpus web: files"):
        documents, dropped = passing(Corpus("web", files=path, on_bad_rows="skip"))
    assert documents["text"][:] == ["c"] and dropped == {"blank": bad}


@pytest.mark.parametrize("streaming", [False, True])
def test_half_of_a_surrogate_pair_costs_no_row(tmp_path, streaming):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one"}\n{"text": "bad \\ud800 text"}\n{"text": "three", "n": 1}\n')
    assert texts_of(str(path), streaming) == ["one", "bad ? text", "three"]


def test_a_json_file_is_read_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(json_files, "_BYTES", 100)
    texts = [f"{number} é" * (number % 9 + 1) for number in range(60)]
    name = write(tmp_path / "a.jsonl", texts)
    assert texts_of(name) == texts and len(load_files([name], "").data.column("text").chunks) > 5


BROKEN = {
    "latin-1 in json": ("a.jsonl", '{"text": "café"}\n'.encode("latin-1"), "a.jsonl is not UTF-8 text: convert it"),
    "latin-1 in a list": ("a.json", '[{"text": "café"}]'.encode("latin-1"), "a.json is not UTF-8 text: convert it"),
    "latin-1 in text": ("a.txt", b"x" * 99_999 + b"\xe9 ", r"a.txt is not UTF-8 text \(byte 99999\)"),
    "latin-1 behind a mark": ("a.txt", b"\xef\xbb\xbfab\xe9 ", r"a.txt is not UTF-8 text \(byte 5\)"),
    "a number": ("a.jsonl", b'{"text": "a"}\n{"text": 1}', "a.jsonl has no column 'text' of strings"),
    "a number later": (
        "a.jsonl",
        b'{"text": "a"}\n' * 1_000 + b'{"text": 1}',
        "a.jsonl, row 1,001, has no text in the column 'text': correct it, or leave out bad rows with ",
    ),
    "no text": ("a.jsonl", b'{"page": "a"}\n', "a.jsonl has no column 'text' of strings among page"),
    "an archive": ("a.jsonl.zip", b"PK", "a.jsonl.zip is compressed: unpack it"),
    "an archive, compressed": ("a.tar.gz", b"PK", "a.tar.gz is compressed: unpack it"),
    "cut off": ("a.jsonl.gz", gzip.compress(b'{"text": "a"}')[:-9], "a.jsonl.gz cannot be read as json, write it ag"),
    "a field too many": (
        "a.csv",
        b"id,text\n1,a\n2,b\n3,c,d\n",
        "a.csv, row 3, has 3 fields instead of 2: correct it",
    ),
    "no column of text": ("a.tsv", b"id\tday\n1\t2024-01-01\n", "a.tsv has no column 'text' among day, id: name one"),
    "arrow": ("a.arrow", b"ARROW no more", "a.arrow cannot be read as arrow, write it again"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_file_that_cannot_be_read_is_named_alone_and_in_a_mixture(tmp_path, case):
    name, content, message = BROKEN[case]
    (tmp_path / name).write_bytes(content)
    pattern = str(tmp_path / name)
    if Path(name).suffix in (".txt", ".jsonl", ".json", ".arrow"):
        # A whole file comes first where the file is one of several.
        write(tmp_path / f"0{Path(name).suffix}", ["a whole file"])
        pattern = str(tmp_path / ("*" + Path(name).suffix))
    for read in (texts_of, lambda pattern: texts_of(pattern, streaming=True)):
        with pytest.raises(ValueError, match=f"--train_file {tmp_path}/{message}") as caught:
            read(pattern)
        assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match=f"corpus web: files {tmp_path}/{message}"):
        passing(Corpus("web", files=pattern))


@pytest.mark.parametrize("flag", ["train_file", "dataset_name"])
@pytest.mark.parametrize("streaming", [False, True])
def test_a_folder_of_save_to_disk_is_read(tmp_path, flag, streaming):
    texts = [f"text {number}" for number in range(40)]
    one, several = tmp_path / "one[1]", tmp_path / "sev::eral"
    datasets.disable_progress_bar()
    Dataset.from_dict({"text": texts, "id": range(40)}).save_to_disk(one, num_shards=3)
    held = Dataset.from_dict({"text": ["held out"]})
    DatasetDict(train=Dataset.from_dict({"text": texts}), validation=held).save_to_disk(tmp_path / "several")
    (tmp_path / "several").rename(several)
    for folder in map(str, (one, several)):
        held = {"validation_file": str(several)} if flag == "train_file" else {}
        sources = open_sources(DataConfig(**{flag: folder}, **held, streaming=streaming))
        train, validation = ([row["text"] for row in part] for part in (sources.train, sources.validation))
        if folder == str(several) or held:
            assert (train, validation) == (texts, ["held out"])
        else:
            assert sorted(train + validation) == sorted(texts) and validation
    documents, _ = passing(Corpus("web", **{"files" if flag == "train_file" else flag: str(several)}))
    assert documents["text"][:] == texts


def test_a_saved_folder_without_the_split_or_a_file_is_named(tmp_path):
    folder = tmp_path / "sets"
    DatasetDict(train=Dataset.from_dict({"text": ["a"]})).save_to_disk(folder)
    with pytest.raises(ValueError, match="--validation_file .*sets has no split 'validation': name one of its"):
        find_files(str(folder), "--validation_file", "validation")
    for names in (["../a.arrow"], ["none.arrow"], [3]):
        state = {"_data_files": [{"filename": name} for name in names]}
        (folder / "train" / "state.json").write_text(json.dumps(state))
        with pytest.raises(ValueError, match="--train_file .*state.json names files that are not there"):
            find_files(str(folder), "--train_file")
    for file, content in (("train/state.json", "["), ("dataset_dict.json", "{}"), ("dataset_dict.json", "[")):
        (folder / file).write_text(content)
        with pytest.raises(ValueError, match=rf"--train_file .*{file} .*save the data set again"):
            find_files(str(folder), "--train_file")


@pytest.mark.parametrize(
    "options, named",
    [
        ({"split": "test"}, "has no splits, and split names test: leave it out"),
        ({"split": "train[:10%]"}, "has no splits, and split names"),
        ({"data_dir": "nowhere"}, "is a folder of save_to_disk, which has no data_dir: leave it out"),
        ({"dataset_config_name": "small"}, "which has no dataset_config_name: leave it out"),
    ],
)
def test_what_a_saved_folder_does_not_have_is_refused(tmp_path, options, named):
    Dataset.from_dict({"text": ["a", "b"]}).save_to_disk(tmp_path / "set")
    with pytest.raises(ValueError, match=re.escape(named)):
        passing(Corpus("web", dataset_name=str(tmp_path / "set"), **options))


def test_what_was_read_is_found_in_the_cache_until_a_file_changes(tmp_path):
    name = write(tmp_path / "a.txt", ["first"])
    (file,) = load_files([name], "").cache_files
    state = os.stat(file["filename"])
    assert load_files([name], "").cache_files == [file] and os.stat(file["filename"]) == state
    os.utime(name, ns=(state.st_mtime_ns, state.st_mtime_ns + 1))
    assert load_files([name], "").cache_files != [file]


@pytest.mark.parametrize("kind", ["txt", "jsonl"])
def test_a_file_of_the_same_size_and_time_is_not_taken_for_the_old_one(tmp_path, kind):
    name, other = tmp_path / f"a.{kind}", tmp_path / f"b.{kind}"
    for file, word in ((name, "alpha"), (other, "omega")):
        file.write_text(json.dumps({"text": word}))
        os.utime(file, (1, 1))
    first = load_files([str(name)], "")["text"][0]
    shutil.copy2(other, name)
    copied = load_files([str(name)], "")["text"][0]
    assert os.stat(name).st_mtime == 1 and "alpha" in first and "omega" in copied


def test_tokens_are_found_in_the_cache_of_the_next_process(tmp_path):
    name = write(tmp_path / "a.txt", ["first", "second"])
    assert load_files([name], "")._fingerprint == load_files([name], "")._fingerprint


@pytest.mark.parametrize("kind", ["txt", "jsonl"])
def test_a_cache_that_cannot_be_written_is_replaced_for_the_run(tmp_path, monkeypatch, kind):
    name = write(tmp_path / f"a.{kind}", ["a", "b"])
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "file" / "cache")
    with pytest.warns(UserWarning, match=r"The cache .*file/cache cannot be written \(.*HF_DATASETS_CACHE\."):
        assert texts_of(name) == ["a", "b"]
    # Said once, and the replacement serves all.
    assert texts_of(name) == ["a", "b"]


def test_a_full_cache_is_named_instead_of_the_file(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pa.ipc, "new_stream", full)
    with pytest.raises(ValueError, match="The cache .*cache is full: free some space, or name another folder in HF_D"):
        texts_of(write(tmp_path / "a.txt", ["a"]))


def test_a_text_of_usual_size_is_one_document_and_a_huge_one_is_cut_at_blank_lines(tmp_path, monkeypatch):
    for name, size in (("LONGEST", 4_000), ("PART", 500), ("_LONGEST_LINE", 64)):
        monkeypatch.setattr(text_files, name, size)
    paragraphs = [f"Paragraph {number} with words, more or less.\nAnd a line.\n\n" for number in range(300)]
    usual, huge = "".join(paragraphs[:60]), "".join(paragraphs)
    (tmp_path / "a.txt").write_text(f"{usual}<|endoftext|>\n{huge}<|endoftext|>\nlast")
    found = list(text_files.documents_of_text(str(tmp_path / "a.txt")))
    assert len(usual) < 4_000 and found[0] == usual and found[-1] == "last"
    parts = found[1:-1]
    assert "".join(parts) == huge and all(part.endswith("\n\n") for part in parts)
    assert all(500 <= len(part) <= 1_000 for part in parts[:-1])


@pytest.mark.parametrize("text", ["a\n" * 3_000, "a " * 3_000, "a" * 6_000, "\n" * 6_000])
def test_a_huge_text_without_blank_lines_is_cut_where_it_can_be(tmp_path, monkeypatch, text):
    for name, size in (("LONGEST", 4_000), ("PART", 500), ("_LONGEST_LINE", 64)):
        monkeypatch.setattr(text_files, name, size)
    (tmp_path / "a.txt").write_text(text)
    parts = list(text_files.documents_of_text(str(tmp_path / "a.txt")))
    assert "".join(parts) == text and all(len(part) <= 1_000 for part in islice(parts, len(parts)))
