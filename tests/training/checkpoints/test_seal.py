"""Untrusted checkpoints: a forged manifest, links and pipes instead of files, files that are not listed."""

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from checkpoint_run import Run, forge, names
from safetensors.torch import load_file, save_file

from hope_hf.training.checkpoints.manifest import describe, latest_checkpoint, verify
from hope_hf.training.checkpoints.reader import find_checkpoint, load_weights
from hope_hf.training.checkpoints.tool import main

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
        assert latest_checkpoint(output_dir) == output_dir / "checkpoint-3"
    with pytest.raises(ValueError, match=r"resume from another checkpoint\.$") as caught:
        find_checkpoint(output_dir, str(folder))
    assert main(["consolidate", str(folder), "--to", str(copy)]) == 2
    assert not copy.exists()
    main(["info", str(folder)])
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    "name",
    ["../outside", "/outside", "a/../../outside", "..", ".", "", "a//b", "./a", "manifest.json", "a\nb", "\ud800"],
)
def test_names_that_are_no_files_of_the_folder(output_dir, name):
    (output_dir / "outside").write_text("x")
    files = describe(output_dir, [output_dir / "outside"])["outside"]
    forge(output_dir / "checkpoint-5", files={**verify(output_dir / "checkpoint-5")["files"], name: files})
    assert f"is no checkpoint's, see its file {name!r}" in refused(output_dir)


@pytest.mark.parametrize(
    "fields, said",
    [
        ({"step": "5"}, "step"), ({"step": True}, "step"), ({"step": -5}, "step"), ({"step": 5.0}, "step"),
        ({"step": 4}, "step"), ({"step": 10**30}, "step"), ({"step": None}, "step"),
        ({"num_processes": 0}, "num_processes"), ({"num_processes": None}, "num_processes"),
        ({"only_model": 0}, "only_model"), ({"only_model": None}, "only_model"),
        ({"files": None}, "files"), ({"files": [FILE]}, "files"),
        ({"files": {"a": 1}}, "entry of a"), ({"files": {"a": {}}}, "entry of a"),
        ({"files": {"a": FILE | {"size": -1}}}, "entry of a"), ({"files": {"a": FILE | {"size": "1"}}}, "entry of a"),
        ({"files": {"a": FILE | {"size": 10**30}}}, "entry of a"),
        ({"files": {"a": FILE | {"sha256": 7}}}, "entry of a"),
    ],
)  # fmt: skip
def test_fields_that_no_training_writes(output_dir, fields, said):
    forge(output_dir / "checkpoint-5", **fields)
    assert f"manifest.json is no checkpoint's, see its {said}: " in refused(output_dir)


@pytest.mark.parametrize(
    "content", ["null", "[]", '"text"', "", "[" * 100_000, '{"sha256": ' * 100_000, " " * 2**26 + "{}"]
)
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
@pytest.mark.parametrize("name", ["manifest.json", "model.safetensors", "trainer.json"])
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
    forge(folder, files={**verify(folder)["files"], **describe(folder, [index])})
    with pytest.raises(ValueError, match=part):
        load_weights(Run().model, folder)
    assert main(["consolidate", str(folder), "--to", str(output_dir / "copy")]) == 2
    assert part in capsys.readouterr().err and not (output_dir / "copy").exists()


@pytest.mark.parametrize("name", ["trainer.json", "optimizer.json", "rank_0.json", "model.safetensors"])
def test_a_file_that_every_training_lists(output_dir, name):
    folder = output_dir / "checkpoint-5"
    files = verify(folder)["files"]
    del files[name]
    forge(folder, files=files)
    with pytest.raises(ValueError, match=f"manifest.json lists no {name}: resume from another checkpoint.$"):
        Run().restore(output_dir)


def test_every_file_has_the_rights_of_the_umask(tmp_path):
    before = os.umask(0o027)
    try:
        folder = Run().save(tmp_path, carried={"memory": torch.ones(2)})
    finally:
        os.umask(before)
    assert {oct(path.stat().st_mode & 0o777) for path in folder.iterdir()} == {"0o640"}
