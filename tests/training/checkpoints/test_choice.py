"""Only a checkpoint that is complete to the last bit is chosen, and memories of another process count are refused."""

import json
import random
from pathlib import Path

import pytest
import torch
from accelerate import PartialState
from checkpoint_run import Run, truncate

from hope_hf.training.checkpoints.manifest import latest_checkpoint, verify
from hope_hf.training.checkpoints.reader import find_checkpoint

pytestmark = pytest.mark.usefixtures("one_cpu_process")


def flip_a_bit(path: Path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


DAMAGES = [truncate, flip_a_bit, Path.unlink]
FILES = ["model.safetensors", "optimizer_rank_0.safetensors", "trainer.json", "rank_0.json", "config.json"]
FILES += ["manifest.json"]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("file", FILES)
def test_a_damaged_checkpoint_is_not_chosen(output_dir, file, damage):
    damaged = output_dir / "checkpoint-5"
    damage(damaged / file)
    with pytest.warns(UserWarning, match="Not chosen: .*checkpoint-5"):
        assert latest_checkpoint(output_dir) == output_dir / "checkpoint-3"
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
    assert verify(manifest.parent)["step"] == 3


def test_choosing(output_dir, tmp_path):
    assert find_checkpoint(output_dir, None).step == find_checkpoint(output_dir, "latest").step == 5
    assert find_checkpoint(output_dir, str(output_dir / "checkpoint-3")).step == 3
    assert find_checkpoint(tmp_path / "nothing", None) is None
    with pytest.raises(ValueError, match="--resume_from_checkpoint latest: .*nothing holds no checkpoint"):
        find_checkpoint(tmp_path / "nothing", "latest")
    with pytest.raises(ValueError, match="checkpoint-9 is not a folder"):
        find_checkpoint(output_dir, str(output_dir / "checkpoint-9"))


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
