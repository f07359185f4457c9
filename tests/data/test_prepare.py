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
from hope_hf.data import prepare
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
    assert not list(folder.rglob("*.tmp-*"))


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


def test_a_folder_with_other_files_is_refused_and_left_as_it_is(mixture, tmp_path, capsys):
    folder = tmp_path / "runs"
    (folder / "notes").mkdir(parents=True)
    (folder / "notes" / "thesis.tmp").write_text("years of work")
    refused(
        capsys, prepare_words(mixture, folder), f"--output_dir {folder} holds 'notes', which is not a file of shards"
    )
    (folder / "notes" / "train-00000.bin").write_text("mine")
    (folder / "run.json").write_text("{}")
    refused(capsys, prepare_words(mixture, folder), "holds 'notes', which is not a file of shards: name an")
    assert {path.name for path in folder.rglob("*")} == {"notes", "thesis.tmp", "train-00000.bin", "run.json"}


def test_only_its_own_unfinished_files_are_removed_and_no_link_is_followed(mixture, shards, copy, tmp_path):
    mine, victim = copy / "rows" / "thesis.tmp", tmp_path / "victim"
    for path in (mine, victim):
        path.write_text("mine")
    own = [copy / f"{name}.tmp-{'0af3' * 4}" for name in ("plan.json", "rows/train-00001.bin")]
    for path in own:
        path.symlink_to(victim)
    for name in ("rows/train-00001.tmp", "manifest.json.tmp", "plan.json.tmp", "progress.tmp"):
        (copy / name).symlink_to(victim)
    # A shard of its own is none where it is a link.
    shutil.move(copy / "rows" / "train-00001.bin", tmp_path / "moved.bin")
    (copy / "rows" / "train-00001.bin").symlink_to(tmp_path / "moved.bin")
    (copy / "progress.jsonl").rename(tmp_path / "progress.jsonl")
    (copy / "progress.jsonl").symlink_to(tmp_path / "progress.jsonl")
    noted = (tmp_path / "progress.jsonl").read_bytes()
    assert main(prepare_words(mixture, copy)) == 0
    assert content(copy) == content(shards) and not (copy / "rows" / "train-00001.bin").is_symlink()
    assert mine.read_text() == victim.read_text() == "mine" and (tmp_path / "progress.jsonl").read_bytes() == noted
    assert not any(path.is_symlink() for path in own)


@pytest.mark.parametrize("name", ["rows", "tokenizer"])
def test_a_link_in_the_place_of_a_folder_is_refused(mixture, copy, tmp_path, capsys, name):
    shutil.move(copy / name, tmp_path / "elsewhere")
    (copy / name).symlink_to(tmp_path / "elsewhere")
    refused(capsys, prepare_words(mixture, copy), f"--output_dir {copy / name} is a link or a file, not a folder of")


def first(old, new):
    """Changes the first line."""
    return lambda lines: lines.insert(0, lines.pop(0).replace(old, new))


@pytest.mark.parametrize(
    "change, sentence",
    [
        (lambda lines: lines.insert(1, "garbage"), "line 2 is not a shard: Expecting value"),
        (lambda lines: lines.insert(1, "[" * 100_000), "line 2 is not a shard: "),
        (lambda lines: lines.insert(1, lines[1]), "line 3 is repeated or out of order"),
        (lambda lines: lines.pop(0), "line 1 is repeated or out of order"),
        (first("notes/", "../x/"), "line 1 is not a shard: file is '../x/"),
        (first("notes/", "other/"), "line 1 is repeated or out of order"),
        (first('"tokens": ', '"tokens": -'), "line 1 is not a shard: tokens is -"),
        (first('"last"', '"more": 1, "last"'), "line 1 is not a shard: "),
        (first("false", '"no"'), "is not a shard: last is 'no', not true or false"),
        (first("false", "true"), "line 2 follows the last shard of its part"),
    ],
)
def test_progress_that_prepare_did_not_write_is_named(mixture, copy, capsys, change, sentence):
    file = copy / "progress.jsonl"
    lines = file.read_text().splitlines()
    change(lines)
    file.write_text("\n".join(lines) + "\n")
    refused(capsys, prepare_words(mixture, copy), f"--output_dir {file} is not as prepare wrote it, ")
    assert main(prepare_words(mixture, copy)) == 2 and sentence in capsys.readouterr().err


def test_progress_that_counts_other_documents_is_named(mixture, copy, capsys):
    file = copy / "progress.jsonl"
    lines = file.read_text().splitlines()
    lines[0] = lines[0].replace('"documents": ', '"documents": 9')
    file.write_text("\n".join(lines[:2]) + "\n")
    refused(capsys, prepare_words(mixture, copy), f"{file} counts 9")
    # Without a limit all documents are read.
    lines[2] = re.sub('"documents": [0-9]+', '"documents": 1', lines[2])
    file.write_text("".join(line + "\n" for line in lines if '"notes/train"' not in line))
    refused(capsys, prepare_words(mixture, copy), f"{file} counts ")


@pytest.mark.parametrize("name", ["plan.json", "manifest.json", "progress.jsonl"])
def test_a_pipe_or_a_list_in_the_place_of_a_file_is_named(mixture, copy, capsys, name):
    if name == "plan.json":
        (copy / "manifest.json").unlink()
    else:
        (copy / name).unlink()
    os.mkfifo(copy / name)
    refused(capsys, prepare_words(mixture, copy), f"--output_dir {copy / name} ")
    if name != "progress.jsonl":
        (copy / name).unlink()
        (copy / name).write_text("[]")
        refused(capsys, prepare_words(mixture, copy), f"--output_dir {copy / name} cannot be read, ")


def test_a_pipe_in_the_place_of_a_tokenizers_file_is_named(mixture, copy, capsys):
    (copy / "tokenizer" / "tokenizer.json").unlink()
    os.mkfifo(copy / "tokenizer" / "tokenizer.json")
    refused(capsys, prepare_words(mixture, copy), "holds another tokenizer (tokenizer.json differs)")


@pytest.mark.parametrize("plan", [{}, {"format": [1]}, {"format": 1, "tokenizer": 3}, {"\x1b[31m": 1}])
def test_another_plan_is_named_without_its_escapes(mixture, copy, capsys, plan):
    (copy / "manifest.json").unlink()
    (copy / "plan.json").write_text(json.dumps(plan))
    refused(capsys, prepare_words(mixture, copy), f"--output_dir {copy} holds other shards (")
    assert main(prepare_words(mixture, copy)) == 2 and "\x1b" not in capsys.readouterr().err


def test_a_killed_process_is_a_sentence_and_the_same_command_goes_on(mixture, shards, copy, capsys, monkeypatch):
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
        patch.setattr(prepare, "EncodingPool", Dying)
        words = [*prepare_words(mixture, copy), "--num_proc", "2"]
        refused(capsys, words, "One of the 2 processes of --num_proc was killed, perhaps out of memory: lower")
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
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(100, 95, 5))
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
    refused(
        capsys, prepare_words_of(other, mixture, tmp_path / "out"), "corpus a, is tokenized already: leave it out."
    )


def test_a_missing_mixture_is_asked_for(capsys):
    refused(capsys, ["--tokenizer_name", "t", "--output_dir", "o"], "The mixture is missing: name a YAML file")
