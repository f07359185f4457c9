"""Only a checkpoint that is complete to the last bit is chosen. Untrusted ones: forged manifests, links and pipes
instead of files, files that are not listed."""

import json
import os
import random
import signal
from pathlib import Path

import pytest
import torch
from accelerate import PartialState
from checkpoint_run import Run, forge, names, truncate
from safetensors.torch import load_file, save_file

from hope_hf.evaluation.checkpoints import as_checkpoint
from hope_hf.training.checkpoints.manifest import describe, latest_checkpoint, rotate, verify
from hope_hf.training.checkpoints.reader import find_checkpoint
from hope_hf.training.checkpoints.tool import main
from hope_hf.training.checkpoints.weights import load_weights

pytestmark = pytest.mark.usefixtures("one_cpu_process", "no_waiting")

FILE = {"size": 1, "sha256": "0" * 64}


@pytest.fixture
def no_waiting():
    """Opening a pipe would block forever: give up after some seconds."""

    def give_up(*_):
        raise AssertionError("it hangs")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def refused(output_dir: Path) -> str:
    """Checkpoint 5 is skipped, and no program resumes from it or copies it; returns the error."""
    folder, copy = output_dir / "checkpoint-5", output_dir / "copy"
    with pytest.warns(UserWarning, match="Not chosen: .*checkpoint-5"):
        assert latest_checkpoint(output_dir).folder == output_dir / "checkpoint-3"
    with pytest.raises(ValueError, match=r"resume from another checkpoint\.$") as caught:
        find_checkpoint(output_dir, str(folder))
    assert main(["consolidate", str(folder), "--to", str(copy)]) == 2
    assert not copy.exists()
    main(["info", str(folder)])
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", ["../outside", "/outside", "", "./a", "manifest.json", "a\nb", "\ud800"])
def test_names_that_are_no_files_of_the_folder(output_dir, name):
    (output_dir / "outside").write_text("x")
    files = describe(output_dir, [output_dir / "outside"])["outside"]
    forge(output_dir / "checkpoint-5", files={**verify(output_dir / "checkpoint-5").files, name: files})
    assert f"is no checkpoint's, see its file {name!r}" in refused(output_dir)


@pytest.mark.parametrize(
    "fields, said",
    [
        ({"step": True}, "step"), ({"step": 4}, "step"), ({"step": None}, "step"),
        ({"only_model": None}, "only_model"), ({"num_processes": 0}, "num_processes"),
        ({"files": [FILE]}, "files"), ({"files": {"a": {}}}, "entry of a"),
        ({"files": {"a": FILE | {"size": -1}}}, "entry of a"),
    ],
)  # fmt: skip
def test_fields_that_no_training_writes(output_dir, fields, said):
    forge(output_dir / "checkpoint-5", **fields)
    assert f"manifest.json is no checkpoint's, see its {said}: " in refused(output_dir)


@pytest.mark.parametrize("content", ["null", "", "[" * 100_000, " " * 2**26 + "{}"])
def test_manifests_that_are_none(output_dir, content):
    (output_dir / "checkpoint-5" / "manifest.json").write_text(content)
    assert "manifest.json cannot be read" in refused(output_dir)


def pipe(path: Path):
    os.mkfifo(path)


def device(path: Path):
    path.symlink_to("/dev/zero")


def link_out(path: Path):
    # The same bytes, but in another folder.
    path.symlink_to(path.parents[1] / "elsewhere")


@pytest.mark.parametrize("replace", [pipe, device, link_out, Path.mkdir], ids=lambda replace: replace.__name__)
@pytest.mark.parametrize("name", ["manifest.json", "model.safetensors"])
def test_what_is_no_file_of_the_folder_is_not_opened(output_dir, name, replace):
    file = output_dir / "checkpoint-5" / name
    file.rename(output_dir / "elsewhere")
    replace(file)
    assert f"{file} " in refused(output_dir)


def test_what_is_not_listed_is_not_read(output_dir):
    """Not other weights, an extra process's optimizer state, or tensors added to a state's JSON."""
    folder, fresh, expected = output_dir / "checkpoint-5", Run(seed=3), Run(seed=4)
    expected.restore(output_dir)
    evil = {name: torch.zeros_like(tensor) for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(evil, output_dir / "evil.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(evil, "../evil.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    for name in ("optimizer_rank_9.json", "optimizer_rank_9.safetensors", "trainer.safetensors"):
        (folder / name).write_text("{}")
    fresh.restore(output_dir)
    for (name, a), (_, b) in zip(fresh.model.named_parameters(), expected.model.named_parameters(), strict=True):
        assert torch.equal(a, b), name
    assert main(["consolidate", str(folder), "--to", str(output_dir / "copy")]) == 0
    assert "model.safetensors.index.json" not in names(output_dir / "copy")


@pytest.mark.parametrize("part", ["../evil.safetensors", "unlisted.safetensors"])
def test_an_index_leads_to_listed_files_only(output_dir, part, capsys):
    folder = output_dir / "checkpoint-5"
    (folder / part).write_bytes((folder / "model.safetensors").read_bytes())
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": {"lm_head.weight": part}}))
    forge(folder, files={**verify(folder).files, **describe(folder, [index])})
    with pytest.raises(ValueError, match=part):
        load_weights(Run().model, verify(folder))
    assert main(["consolidate", str(folder), "--to", str(output_dir / "copy")]) == 2
    assert part in capsys.readouterr().err and not (output_dir / "copy").exists()


@pytest.mark.parametrize("name", ["trainer.json", "model.safetensors"])
def test_a_file_that_every_training_lists(output_dir, name):
    folder = output_dir / "checkpoint-5"
    files = verify(folder).files
    del files[name]
    forge(folder, files=files)
    with pytest.raises(ValueError, match=f"manifest.json lists no {name}: resume from another checkpoint.$"):
        Run().restore(output_dir)


def flip_a_bit(path: Path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


@pytest.mark.parametrize("damage", [truncate, flip_a_bit, Path.unlink], ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("file", ["model.safetensors", "rank_0.json", "manifest.json"])
def test_a_damaged_checkpoint_is_not_chosen(output_dir, file, damage):
    damaged = output_dir / "checkpoint-5"
    damage(damaged / file)
    with pytest.warns(UserWarning, match="Not chosen: .*checkpoint-5"):
        assert latest_checkpoint(output_dir).folder == output_dir / "checkpoint-3"
    with pytest.raises(ValueError, match="checkpoint-5.* resume from another checkpoint.$") as caught:
        find_checkpoint(output_dir, str(damaged))
    assert "\n" not in str(caught.value)


def test_every_bit_of_the_manifest_counts(output_dir):
    """Steps, sizes and counts are only there; a flipped bit in them must be found."""
    manifest = output_dir / "checkpoint-3" / "manifest.json"
    whole = manifest.read_bytes()
    places = random.Random(0).sample(range(len(whole)), 60)
    for place in places:
        data = bytearray(whole)
        data[place] ^= 1
        manifest.write_bytes(data)
        try:
            same = json.loads(data) == json.loads(whole)
        except ValueError:
            same = False
        if not same:
            with pytest.raises(ValueError, match="checkpoint-3"):
                verify(manifest.parent)
    manifest.write_bytes(whole)
    assert verify(manifest.parent).step == 3


def test_choosing(output_dir, tmp_path):
    assert find_checkpoint(output_dir, None).step == find_checkpoint(output_dir, "latest").step == 5
    assert find_checkpoint(tmp_path / "fork", str(output_dir / "checkpoint-3")).step == 3
    assert find_checkpoint(output_dir, str(output_dir / "checkpoint-5")).step == 5
    with pytest.raises(ValueError, match="checkpoint-3: the run has gone on to checkpoint-5; give a new --output_dir"):
        find_checkpoint(output_dir, str(output_dir / "checkpoint-3"))
    assert find_checkpoint(tmp_path / "nothing", None) is None
    with pytest.raises(ValueError, match="--resume_from_checkpoint latest: .*nothing holds no checkpoint"):
        find_checkpoint(tmp_path / "nothing", "latest")
    with pytest.raises(ValueError, match="checkpoint-9 is not a folder"):
        find_checkpoint(output_dir, str(output_dir / "checkpoint-9"))


def test_rotation_keeps_as_many_as_the_limit_says(output_dir):
    newest = output_dir / "checkpoint-5"
    mark = verify(newest).facts.get("run", "")
    rotate(output_dir, newest, mark, save_total_limit=2)
    assert (output_dir / "checkpoint-3").is_dir()
    rotate(output_dir, newest, mark, save_total_limit=1)
    assert not (output_dir / "checkpoint-3").exists() and newest.is_dir()


def test_when_no_checkpoint_is_whole_the_run_does_not_begin_again_by_itself(output_dir):
    for step in (3, 5):
        truncate(output_dir / f"checkpoint-{step}" / "model.safetensors")
    with pytest.warns(UserWarning), pytest.raises(ValueError, match="holds no complete checkpoint; delete"):
        find_checkpoint(output_dir, None)


def test_memories_of_another_number_of_processes_are_refused(tmp_path, one_cpu_process, monkeypatch):
    run = Run()
    run.save(tmp_path, carried={"memory": torch.ones(2)})
    monkeypatch.setitem(PartialState._shared_state, "num_processes", 2)
    with pytest.raises(ValueError, match="memories of 1 processes .* this run has 2: launch it with --num"):
        find_checkpoint(tmp_path, None)


def test_latest_links_to_the_newest_checkpoint(output_dir):
    link = output_dir / "latest"
    assert os.readlink(link) == "checkpoint-5" and as_checkpoint(str(link)).step == 5
    assert find_checkpoint(output_dir.parent / "other", str(link)).path == output_dir / "checkpoint-5"
    run = Run()
    run.restore(output_dir)
    for place, expected in ((None, "checkpoint-6"), ("elsewhere", "elsewhere")):
        # A link of the user's own to somewhere else stays.
        if place:
            link.unlink()
            link.symlink_to(place)
        run.train(1)
        run.save(output_dir)
        assert os.readlink(link) == expected
    # So does a folder.
    link.unlink()
    link.mkdir()
    run.train(1)
    run.save(output_dir)
    assert link.is_dir() and not link.is_symlink() and not list(output_dir.glob("latest.tmp-*"))


def test_a_checkpoint_of_another_version_is_named(output_dir):
    forge(output_dir / "checkpoint-5", format=99)
    with pytest.raises(ValueError, match="another version of hope_hf"):
        Run().restore(output_dir)
