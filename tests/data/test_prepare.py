"""`python -m hope_hf.data.prepare`: the same shards however it is run, killed or repeated, and what it refuses."""

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from four_corpora import TEXT_TOGETHER, prepare_words, sentence

from hope_hf.cli.folder_lock import FolderLock
from hope_hf.data import preparation
from hope_hf.data.prepare import main

ROOT = Path(__file__).parents[2]
# Dies by SIGKILL at one of the moments when a file is written, moved or flushed to the disk.
DIES = """
import os, signal, sys
from pathlib import Path
from hope_hf.data import encode_batches, prepare, shard_writer

left = int(sys.argv.pop(1))
encode_batches.CHARACTERS = int(sys.argv.pop(1))

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


def refused(capsys, words, sentence):
    capsys.readouterr()
    assert main(words) == 2
    assert sentence in capsys.readouterr().err


def test_the_manifest_says_what_is_there(mixture, shards):
    files, manifest = content(shards)
    listed = {
        shard["file"]: shard["tokens"]
        for corpus in manifest["corpora"].values()
        for part in ("train", "validation")
        for shard in corpus[part]["shards"]
    }
    assert {name: len(data) // 2 for name, data in files.items()} == listed
    assert sum(name.startswith("notes/train") for name in listed) > 1
    notes, rows, pages = (manifest["corpora"][name] for name in ("notes", "rows", "pages"))
    assert rows["dropped"] == {"deduplicate": 1, "blank": 1, "min_length": 1}
    assert rows["train"]["documents"] + rows["validation"]["documents"] == 80
    assert pages["train"]["documents"] == 70
    assert pages["dropped"] == {"max_documents": 120 - 70 - pages["validation"]["documents"]}
    # The document that makes the limit is read whole.
    longest = max(len(sentence(0, number)) for number in range(60))
    assert 3000 <= notes["train"]["tokens"] < 3000 + longest
    book = manifest["corpora"]["book"]
    # Parted at a blank line, with nothing lost.
    assert (
        book["train"]["text_bytes"] + book["validation"]["text_bytes"] == (mixture.parent / "book.txt").stat().st_size
    )
    assert manifest["plan"]["corpora"]["rows"]["min_length"] == 20
    assert manifest["versions"]["tokenizers"] and "commit" in manifest["git"]


def test_killed_again_and_again_it_writes_the_same_bytes(mixture, shards, tmp_path, warm_python):
    folder = tmp_path / "shards"
    kills = 0
    while kills < 100:
        words = [sys.executable, "-c", DIES, str(7 * kills % 31), str(TEXT_TOGETHER), *prepare_words(mixture, folder)]
        status = subprocess.run(words, cwd=ROOT, capture_output=True, timeout=120).returncode
        if status != -signal.SIGKILL:
            break
        kills += 1
    assert status == 0 and kills >= 5
    assert content(folder) == content(shards)
    assert not list(folder.glob("*/*.tmp"))


def test_processes_write_the_same_bytes(mixture, shards, tmp_path):
    folder = tmp_path / "shards"
    assert main([*prepare_words(mixture, folder), "--num_proc", "2"]) == 0
    assert content(folder) == content(shards)


@pytest.fixture
def copy(shards, tmp_path):
    """A copy of the shards that a test may change."""
    return shutil.copytree(shards, tmp_path / "shards")


def test_repeated_it_writes_nothing(mixture, copy, capsys, monkeypatch):
    before = {path: path.stat().st_mtime_ns for path in copy.glob("*/*.bin")}
    assert main(prepare_words(mixture, copy)) == 0
    assert {path: path.stat().st_mtime_ns for path in copy.glob("*/*.bin")} == before
    assert f"Train on them with --train_shards {copy}" in capsys.readouterr().out


def test_repeated_it_mends_what_is_broken(mixture, shards, copy):
    (copy / "rows" / "train-00001.bin").unlink()
    changed = bytearray((copy / "notes" / "train-00000.bin").read_bytes())
    changed[7] ^= 1
    (copy / "notes" / "train-00000.bin").write_bytes(changed)
    assert main(prepare_words(mixture, copy)) == 0
    assert content(copy) == content(shards)


@pytest.mark.parametrize(
    "change, difference",
    [
        (["--seed", "7"], "seed is 42, now 7"),
        (["--shard_tokens", "2048"], "shard_tokens is 1024, now 2048"),
        (["--validation_split_percentage", "3"], "validation_split_percentage is 10.0, now 3.0"),
    ],
)
def test_other_flags_in_the_same_folder_are_refused_by_name(mixture, copy, capsys, change, difference):
    words = prepare_words(mixture, copy)
    for flag, value in zip(change[::2], change[1::2], strict=True):
        words = words[: words.index(flag)] + words[words.index(flag) + 2 :] if flag in words else words
        words += [flag, value]
    refused(capsys, words, f"--output_dir {copy} holds other shards ({difference}): name another folder or remove")


def test_another_mixture_text_or_tokenizer_is_refused_by_name(mixture, copy, capsys, tmp_path):
    other = tmp_path / "mix.yaml"
    other.write_text(mixture.read_text().replace("weight: 0.4", "weight: 0.5"))
    refused(capsys, prepare_words_of(other, mixture, copy), "shards (corpora: notes: weight is 0.4, now 0.5)")
    other.write_text(mixture.read_text().replace("  rows:", "  lines:"))
    refused(capsys, prepare_words_of(other, mixture, copy), "holds other shards (corpora: lines is null, now {")
    (tmp_path / "book.txt").write_text((mixture.parent / "book.txt").read_text() + "More.")
    other.write_text(mixture.read_text().replace(f"{mixture.parent}/book.txt", f"{tmp_path}/book.txt"))
    refused(capsys, prepare_words_of(other, mixture, copy), "holds other shards (corpora: book: files is ")
    words = prepare_words(mixture, copy)
    words[2] = str(ROOT / "tests" / "none")
    refused(capsys, words, "--tokenizer_name")


def prepare_words_of(other, mixture, folder):
    return [str(other), *prepare_words(mixture, folder)[1:]]


def test_a_full_disk_is_foreseen(mixture, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(preparation.shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(100, 95, 5))
    refused(
        capsys, prepare_words(mixture, tmp_path / "shards"), "has 0.0 GB of free disk and the shards need about 0.0 GB"
    )
    assert not (tmp_path / "shards").exists()


def test_a_folder_in_use_is_refused(mixture, tmp_path, capsys):
    lock = FolderLock(tmp_path / "shards")
    lock.acquire()
    refused(capsys, prepare_words(mixture, tmp_path / "shards"), "is in use, another process writes to it")
    lock.release()


def test_a_limit_beyond_the_corpus_is_refused_before_the_manifest(mixture, tmp_path, capsys):
    other = tmp_path / "mix.yaml"
    other.write_text(mixture.read_text().replace("max_tokens: 3000", "max_tokens: 150000"))
    words = prepare_words_of(other, mixture, tmp_path / "shards")
    refused(capsys, words, "training tokens, fewer than max_tokens 150000: lower it.")
    assert not (tmp_path / "shards" / "manifest.json").exists()


def test_shards_are_not_prepared_again(shards, tmp_path, mixture, capsys):
    other = tmp_path / "mix.yaml"
    other.write_text(f"corpora: {{a: {{shards: {shards}}}}}")
    refused(capsys, prepare_words_of(other, mixture, tmp_path / "out"), "corpus a, is shards already: leave it out.")


def test_a_missing_mixture_is_asked_for(capsys):
    refused(capsys, ["--tokenizer_name", "t", "--output_dir", "o"], "The mixture is missing: name a YAML file")
