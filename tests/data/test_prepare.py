"""`hope-hf prepare`: the same shards however it is run, killed or repeated, and what it refuses."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest
from four_corpora import TEXT_TOGETHER, prepare_words, sentence

from hope_hf.common.folder_lock import FolderLock
from hope_hf.data import preparation, shard_writer
from hope_hf.data.prepare import main

ROOT = Path(__file__).parents[2]
# Dies by SIGKILL at one of the moments when a file is written, moved or flushed to the disk.
DIES = """
import os, signal, sys
from pathlib import Path
from hope_hf.data import shard_writer, prepare

left = int(sys.argv.pop(1))
shard_writer.CHARACTERS = int(sys.argv.pop(1))

def counted(function):
    def call(*args, **kwargs):
        global left
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **kwargs)
    return call

os.fsync, Path.replace = counted(os.fsync), counted(Path.replace)
shard_writer._OpenShard.write = counted(shard_writer._OpenShard.write)
sys.exit(prepare.main(sys.argv[1:]))
"""


def content(folder):
    """Every file of shards, and the manifest without what differs from call to call."""
    files = {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.glob("*/*.bin"))}
    return files, json.loads((folder / "manifest.json").read_text())


@pytest.fixture
def refused(mixture, capsys):
    """Checks that a call ends with status 2 and words in its error."""

    def check(folder, words, *flags, corpora=mixture):
        command = [str(corpora), *prepare_words(mixture, folder)[1:], *flags]
        capsys.readouterr()
        assert main(command) == 2
        error = capsys.readouterr().err
        assert re.search(words, error), error
        assert "\x1b" not in error

    return check


def test_the_manifest_says_what_is_there(mixture, shards):
    files, manifest = content(shards)
    corpora = manifest["corpora"]
    listed = {}
    for corpus in corpora.values():
        for shard in corpus["train"]["shards"] + corpus["validation"]["shards"]:
            # two bytes a token
            listed[shard["file"]] = 2 * shard["tokens"]
    assert {name: len(data) for name, data in files.items()} == listed
    rows, pages, book = corpora["rows"], corpora["pages"], corpora["book"]
    assert rows["dropped"] == {"deduplicate": 1, "blank": 1, "min_length": 1}
    assert rows["train"]["documents"] + rows["validation"]["documents"] == 80
    assert pages["train"]["documents"] == 70
    # The document that makes the limit is read whole.
    assert 3000 <= corpora["notes"]["train"]["tokens"] < 3000 + len(sentence(0, 59))
    # Parted at a blank line, with nothing lost.
    size = book["train"]["text_bytes"] + book["validation"]["text_bytes"]
    assert size == (mixture.parent / "book.txt").stat().st_size


@pytest.mark.parametrize("moments", [(3, 17), pytest.param(range(0, 60, 3), marks=pytest.mark.long)], ids=["2", "20"])
def test_killed_again_and_again_it_writes_the_same_bytes(mixture, shards, tmp_path, warm_python, moments):
    folder = tmp_path / "shards"
    words = prepare_words(mixture, folder)
    kills = 0
    for moment in moments:
        command = [sys.executable, "-c", DIES, str(moment), str(TEXT_TOGETHER), *words]
        status = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=120).returncode
        assert status in (0, -signal.SIGKILL)
        kills += status != 0
    assert kills >= 2 and main(words) == 0
    assert content(folder) == content(shards)
    assert not list(folder.rglob("*.tmp-*"))


@pytest.mark.parametrize("start", ["fork", pytest.param("spawn", marks=pytest.mark.long)])
def test_processes_write_the_same_bytes(mixture, shards, tmp_path, monkeypatch, start):
    # Forked processes need not import the package, which takes seconds.
    monkeypatch.setattr(shard_writer, "get_context", lambda _: get_context(start))
    folder = tmp_path / "shards"
    assert main([*prepare_words(mixture, folder), "--num_proc", "2"]) == 0
    assert content(folder) == content(shards)


@pytest.fixture
def copy(shards, tmp_path):
    """A copy of the shards that a test may change."""
    return shutil.copytree(shards, tmp_path / "shards")


def test_repeated_it_writes_nothing_or_what_is_broken(mixture, shards, copy):
    before = {path: path.stat().st_mtime_ns for path in copy.glob("*/*.bin")}
    assert main(prepare_words(mixture, copy)) == 0
    assert {path: path.stat().st_mtime_ns for path in copy.glob("*/*.bin")} == before
    (copy / "rows" / "train-00001.bin").unlink()
    changed = bytearray((copy / "notes" / "train-00000.bin").read_bytes())
    changed[7] ^= 1
    (copy / "notes" / "train-00000.bin").write_bytes(changed)
    assert main(prepare_words(mixture, copy)) == 0
    assert content(copy) == content(shards)


def test_a_folder_with_other_files_is_refused_and_left_as_it_is(tmp_path, refused):
    folder = tmp_path / "runs"
    (folder / "notes").mkdir(parents=True)
    for name in ("notes/train-00000.bin", "run.json"):
        (folder / name).write_text("mine")
    refused(folder, f"--output_dir {folder} .*'notes'")
    assert {path.name for path in folder.rglob("*")} == {"notes", "train-00000.bin", "run.json"}


def test_only_its_own_unfinished_files_are_removed_and_no_link_is_followed(mixture, shards, copy, tmp_path):
    mine = copy / "rows" / "thesis.tmp"
    victim = tmp_path / "victim"
    for path in (mine, victim):
        path.write_text("mine")
    own = copy / f"plan.json.tmp-{'0af3' * 4}"
    for path in (own, copy / "manifest.json.tmp", copy / "progress.tmp"):
        path.symlink_to(victim)
    # A shard of its own is none where it is a link.
    shard = copy / "rows" / "train-00001.bin"
    shutil.move(shard, tmp_path / "moved.bin")
    shard.symlink_to(tmp_path / "moved.bin")
    assert main(prepare_words(mixture, copy)) == 0
    assert content(copy) == content(shards) and not shard.is_symlink()
    assert mine.read_text() == victim.read_text() == "mine"
    assert not own.is_symlink()


def test_a_link_in_the_place_of_a_folder_is_refused(copy, tmp_path, refused):
    for name in ("tokenizer", "rows"):
        shutil.move(copy / name, tmp_path / name)
        (copy / name).symlink_to(tmp_path / name)
        refused(copy, f"--output_dir {copy / name} ")
        (copy / name).unlink()
        shutil.move(tmp_path / name, copy / name)


# What is replaced in the first line of progress.jsonl, and words of the error.
PROGRESS = [
    ("^", "garbage\n", "line 1 is not a shard"),
    ("^", "[" * 100_000 + "\n", "line 1 is not a shard"),
    ("^.*\n", "", "line 1 is repeated or out of order"),
    ("^(.*\n)", r"\1\1", "line 2 is repeated or out of order"),
    ('"file": "notes/', '"file": "../x/', "line 1 is repeated or out of order"),
    ("notes/", "other/", "line 1 is repeated or out of order"),
    ('"tokens": ', '"tokens": 0.', "line 1 is not a shard: tokens is 0."),
    ('"last"', '"more": 1, "last"', "line 1 is not a shard"),
    ("false", '"no"', "line 1 is not a shard: last is 'no'"),
    ("false", "true", "line 2 follows the last shard"),
    ('"documents": ', '"documents": 9', "counts 9"),
]


def test_progress_that_prepare_did_not_write_is_named(copy, refused):
    file = copy / "progress.jsonl"
    whole = file.read_text()
    for old, new, words in PROGRESS:
        changed = re.sub(old, new, whole, count=1)
        file.write_text("".join(changed.splitlines(keepends=True)[:2]) if "counts" in words else changed)
        refused(copy, f"--output_dir {file} .*{words}")


def test_a_killed_process_is_a_sentence_and_the_same_command_goes_on(mixture, shards, copy, refused, monkeypatch):
    class Dying(ProcessPoolExecutor):
        """Its processes are killed by the first text. They are forked, which takes no time."""

        def __init__(self, tokenizer, count):
            super().__init__(count, get_context("fork"))
            self.count = count

        def submit(self, *work):
            return super().submit(os._exit, 137)

    for path in copy.glob("notes/*.bin"):
        path.unlink()
    with monkeypatch.context() as patch:
        patch.setattr(preparation, "EncodingPool", Dying)
        refused(copy, "--num_proc", "--num_proc", "2")
    assert main(prepare_words(mixture, copy)) == 0
    assert content(copy) == content(shards)


def test_other_flags_texts_or_tokenizers_in_the_same_folder_are_refused_by_name(mixture, copy, refused, tmp_path):
    refused(copy, rf"--output_dir {copy} .*seed is 42, now 7", "--seed", "7")
    refused(copy, rf"--output_dir {copy} .*shard_tokens is 1024, now 2048", "--shard_tokens", "2048")
    (tmp_path / "book.txt").write_text((mixture.parent / "book.txt").read_text() + "More.")
    other = tmp_path / "mix.yaml"
    for old, new, words in (
        ("weight: 0.4", "weight: 0.5", "corpora: notes: weight is 0.4, now 0.5"),
        ("  rows:", "  lines:", "corpora: lines is null"),
        (f"{mixture.parent}/book.txt", f"{tmp_path}/book.txt", "corpora: book: files is "),
    ):
        other.write_text(mixture.read_text().replace(old, new))
        refused(copy, words, corpora=other)
    refused(copy, "--tokenizer_name", "--tokenizer_name", str(tmp_path / "none"))


def test_another_text_of_as_many_bytes_is_refused(mixture, shards, copy, refused):
    note = mixture.parent / "notes" / "3.txt"
    before = note.read_text()
    try:
        note.write_text(before.replace("Number", "Letter"))
        refused(copy, "corpora: notes: text_hash is")
    finally:
        note.write_text(before)
    # A folder of before says nothing of its texts.
    manifest = json.loads((copy / "manifest.json").read_text())
    for corpus in manifest["plan"]["corpora"].values():
        del corpus["text_hash"]
    (copy / "manifest.json").write_text(json.dumps(manifest))
    assert main(prepare_words(mixture, copy)) == 0
    assert content(copy) == content(shards)


def test_what_cannot_be_prepared_is_named_and_nothing_is_written(mixture, shards, tmp_path, refused, monkeypatch):
    folder = tmp_path / "shards"
    other = tmp_path / "mix.yaml"
    other.write_text(f"corpora: {{a: {{shards: {shards}}}}}")
    refused(folder, "corpus a, .*tokenized", corpora=other)
    other.write_text(mixture.read_text().replace("max_tokens: 3000", "max_tokens: 150000"))
    refused(folder, "max_tokens 150000", corpora=other)
    assert not (folder / "manifest.json").exists()
    lock = FolderLock(folder)
    lock.acquire()
    refused(folder, "in use")
    lock.release()
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(100, 95, 5))
    refused(tmp_path / "full", "free disk")
    assert not (tmp_path / "full").exists()
