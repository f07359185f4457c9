"""Weights in parts (`--save_sharded`): continued bit for bit, joined to what `save_pretrained` writes, or refused."""

import json
import os
from pathlib import Path

import pytest
import torch
from checkpoint_run import MARK, Run, contents, forge, names, truncate
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from hope_hf.common.weights import load_model
from hope_hf.training.checkpoints import weights
from hope_hf.training.checkpoints.manifest import describe, verify
from hope_hf.training.checkpoints.tool import main
from hope_hf.training.checkpoints.weights import load_weights
from hope_hf.training.checkpoints.writer import CheckpointWriter

pytestmark = pytest.mark.usefixtures("one_cpu_process")

NAME = "model.embed_tokens.weight"


def saved_in_parts(run: Run, folder: Path, **options) -> Path:
    folder.mkdir()
    return run.save_with(CheckpointWriter(folder, in_parts=True, **options, mark=MARK))


def read_part(file: Path) -> tuple[dict, dict]:
    with safe_open(file, framework="pt") as opened:
        return load_file(file), json.loads(opened.metadata()["slices"])


def write_parts(folder: Path, parts: dict[int, tuple[dict, dict]]):
    """Put these into a checkpoint in place of its parts, and seal it as the writer does."""
    files = {name: entry for name, entry in verify(folder).files.items() if not name.startswith("model-rank")}
    for rank, (tensors, slices) in parts.items():
        file = folder / f"model-rank{rank}.safetensors"
        save_file(tensors, file, metadata={"slices": json.dumps(slices)})
        files |= describe(folder, [file])
    forge(folder, files=files)


def cut(folder: Path, ranks: int) -> dict[int, tuple[dict, dict]]:
    """The only part of a checkpoint as those of `ranks` processes; small weights leave some of them without any."""
    tensors, slices = read_part(folder / "model-rank0.safetensors")
    parts = {rank: ({}, {}) for rank in range(ranks)}
    for name, whole in tensors.items():
        for rank, values in enumerate(whole.tensor_split(ranks)):
            if len(values):
                start = values.storage_offset()
                parts[rank][0][name], parts[rank][1][name] = values.clone(), {**slices[name], "start": start}
    return parts


@pytest.fixture(params=[False, True], ids=["untied", "tied"])
def run(request):
    run = Run(tie_word_embeddings=request.param)
    run.train(2)
    return run


@pytest.fixture
def folder(tmp_path) -> Path:
    run = Run()
    run.train(2)
    return saved_in_parts(run, tmp_path / "parts")


def test_joined_they_are_the_ordinary_checkpoint_byte_for_byte(run, tmp_path):
    whole, parts = run.save(tmp_path / "whole"), saved_in_parts(run, tmp_path / "parts")
    assert {*names(whole)} ^ {*names(parts)} == {"model.safetensors", "model-rank0.safetensors"}
    for ranks in (1, 3):
        write_parts(parts, cut(parts, ranks) if ranks > 1 else {0: read_part(parts / "model-rank0.safetensors")})
        for checkpoint, out in ((whole, f"whole-{ranks}"), (parts, f"joined-{ranks}")):
            assert main(["consolidate", str(checkpoint), "--to", str(tmp_path / out)]) == 0
        assert contents(tmp_path / f"joined-{ranks}") == contents(tmp_path / f"whole-{ranks}")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "joined-3").num_parameters() == run.model.num_parameters()


def test_a_run_continues_from_them_bit_for_bit(run, tmp_path):
    saved_in_parts(run, tmp_path / "parts")
    tied = run.model.config.tie_word_embeddings
    expected = run.train(3)
    resumed = Run(seed=7, tie_word_embeddings=tied)
    assert resumed.restore(tmp_path / "parts").step == 2
    assert resumed.train(3) == expected


def test_a_large_model_is_joined_to_several_files(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(weights, "JOINED_FILE", "5KB")
    assert main(["consolidate", str(folder), "--to", str(tmp_path / "out")]) == 0
    assert len(list((tmp_path / "out").glob("model-*-of-*.safetensors"))) > 1
    expected = Run(seed=3).model
    load_weights(expected, verify(folder))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), expected.parameters(), strict=True))


def test_every_file_has_the_rights_of_the_umask(tmp_path):
    before = os.umask(0o027)
    try:
        folder = saved_in_parts(Run(), tmp_path / "parts")
        assert main(["consolidate", str(folder), "--to", str(tmp_path / "out")]) == 0
    finally:
        os.umask(before)
    files = [*folder.iterdir(), *(tmp_path / "out").iterdir()]
    assert {oct(path.stat().st_mode & 0o777) for path in files} == {"0o640"}


def refusal(folder: Path, capsys) -> str:
    """The sentence with which parts are neither joined nor read; nothing is left behind."""
    before = names(folder.parent)
    assert main(["consolidate", str(folder), "--to", str(folder.parent / "out")]) == 2
    assert names(folder.parent) == before
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    return error


def test_lost_and_damaged_parts_are_refused(folder, capsys):
    write_parts(folder, cut(folder, 2))
    file = folder / "model-rank1.safetensors"
    truncate(file)
    assert f"{file} has " in refusal(folder, capsys)
    file.unlink()
    assert f"{file} cannot be read (No such file or directory)" in refusal(folder, capsys)


FORGED = {
    "no part of rank 1": lambda parts: parts.pop(1),
    "a slice at another place": lambda parts: parts[1][1][NAME].update(start=0),
    "a slice twice": lambda parts: parts.update({2: parts[1]}),
    "an immense shape": lambda parts: [parts[rank][1][NAME].update(shape=[2**40, 2**40]) for rank in (0, 1)],
    "a weight that no metadata names": lambda parts: parts[1][1].pop(NAME),
    "another dtype": lambda parts: parts[1][0].update({NAME: parts[1][0][NAME].bfloat16()}),
}


@pytest.mark.parametrize("change", FORGED.values(), ids=FORGED.keys())
def test_forged_parts_are_refused(folder, capsys, change):
    parts = cut(folder, 2)
    change(parts)
    write_parts(folder, parts)
    assert "resume from another checkpoint" in refusal(folder, capsys)
    with pytest.raises(ValueError, match=r"(has not all parts of|is no part of a model: )"):
        load_weights(Run().model, verify(folder))


def test_other_programs_say_how_to_join_them(folder):
    with pytest.raises(ValueError, match=r"in parts \(--save_sharded\): join them with `python -m .* consolidate "):
        load_model(str(folder), Run().model.config, "--model_name_or_path")
