#!/usr/bin/env bash
# datasets 5.2.0: `load_dataset` of a folder with JSON Lines and Parquet files gives the rows of one kind alone.
#
# Guess: the folder's rows are the rows of all its files, which have the same columns; or a folder of two kinds is
# refused, as it is where the kinds belong to two splits.
# Seen: the kind with more files is read, and the other files are left out; with one file of each, Parquet is read.
# Streaming does the same. No warning. One more JSON Lines file turns the choice round.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --no-compile datasets==5.2.0
cd "$folder"
HF_HOME="$folder/home" "$folder/env/bin/python" - <<'PROGRAM'
from pathlib import Path

from datasets import Dataset, disable_progress_bars, load_dataset

disable_progress_bars()


def write(folder, name, texts):
    Path(folder).mkdir(exist_ok=True)
    rows = Dataset.from_dict({"text": texts})
    if name.endswith(".jsonl"):
        rows.to_json(f"{folder}/{name}")
    else:
        rows.to_parquet(f"{folder}/{name}")


def texts_of(folder):
    rows = load_dataset(folder, split="train")["text"]
    streamed = load_dataset(folder, split="train", streaming=True)
    assert list(rows) == [row["text"] for row in streamed], "the behaviour changed"
    return list(rows)


for folder in ("one_of_each", "two_of_json"):
    write(folder, "a.jsonl", ["one", "two"])
    write(folder, "b.parquet", ["three", "four", "five"])
write("two_of_json", "c.jsonl", ["six"])
one_of_each, two_of_json = texts_of("one_of_each"), texts_of("two_of_json")
print("a.jsonl and b.parquet, 5 rows:", one_of_each)
print("with c.jsonl, 6 rows:", two_of_json)
assert one_of_each == ["three", "four", "five"] and two_of_json == ["one", "two", "six"], "the behaviour changed"

write("two_splits", "train.jsonl", ["one", "two"])
write("two_splits", "test.parquet", ["three"])
try:
    load_dataset("two_splits")
    refused = ""
except ValueError as error:
    refused = str(error)
print("two splits:", refused)
assert "same data file format" in refused, "the behaviour changed"
PROGRAM
