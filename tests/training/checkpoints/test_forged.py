"""Checkpoints whose files were exchanged and sealed anew: each is refused in one sentence that names the file."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoint_run import Run, forge
from safetensors.torch import load_file, save_file
from training_runs import EVERY_FOURTH, forget_the_end

from hope_hf.training.checkpoints.manifest import describe, read_manifest

Change = Callable[[Path], None]


def text(content: str) -> Change:
    return lambda path: path.write_text(content)


def cut(path: Path):
    path.write_bytes(path.read_bytes()[:-9])


def fields(**changed) -> Change:
    return lambda path: path.write_text(json.dumps(json.loads(path.read_text()) | changed))


def entry(**changed) -> Change:
    """Change a field of every entry of a list or table."""

    def write(path: Path):
        content = json.loads(path.read_text())
        for found in content if isinstance(content, list) else content.values():
            (found["scalars"] if "scalars" in found else found).update(changed)
        path.write_text(json.dumps(content))

    return write


def tensors(change: Callable[[torch.Tensor], torch.Tensor], kind: str = "", **more: torch.Tensor) -> Change:
    """Change the tensors whose names end with `kind`, and add more."""

    def write(path: Path):
        content = load_file(path)
        for name, tensor in content.items():
            if name.endswith(kind):
                content[name] = change(tensor)
        save_file(content | more, path)

    return write


def exchange(folder: Path, file: str, change: Change):
    """Change a file of a checkpoint, and seal the manifest as if a run had written it."""
    change(folder / file)
    forge(folder, files=describe(folder, [folder / name for name in read_manifest(folder).files]))


GROUPS, ENTRIES, STATE = "optimizer.json", "optimizer_rank_0.json", "optimizer_rank_0.safetensors"
# File, change, and what the sentence names besides the file.
ALIEN = {
    "number": ("scheduler.json", text("5"), ""),
    "deep": ("trainer.json", text("[" * 9999), ""),
    "list": (GROUPS, text("[]"), ""),
    "weights": ("model.safetensors", cut, ""),
    "empty": (STATE, text(""), ""),
    "tensor": ("rank_0.json", text('{"rng": {"$tensor": "x"}}'), ""),
    "parts": ("rank_0.json", fields(carried=5), ""),
    "position": ("rank_0.json", fields(data={"rows": -1}), ""),
    "rates": (GROUPS, entry(initial_lr=1e30), "initial_lr 1e+30 and this run 0.01"),
    "eps": (GROUPS, entry(eps="a"), "eps a and this run 1e-08"),
    "step": (ENTRIES, entry(step=-1), "holds a step of"),
    "step-nan": (ENTRIES, entry(step=float("nan")), "holds a step of"),
    "moment-nan": (STATE, tensors(lambda tensor: tensor * float("nan"), ":exp_avg"), "holds a exp_avg of"),
    "moment-large": (STATE, tensors(lambda tensor: tensor.fill_(1e38), ":momentum_buffer"), "holds a momentum_"),
    "variance": (STATE, tensors(lambda tensor: tensor.fill_(-1.0), ":exp_avg_sq"), "holds a exp_avg_sq of"),
    # An optimizer cast it, and took what it did not know.
    "double": (STATE, tensors(torch.Tensor.double), ""),
    "longer": (STATE, tensors(lambda tensor: tensor.repeat(2)), ""),
    "extra": (STATE, tensors(torch.clone, extra=torch.zeros(3)), ""),
}


@pytest.mark.usefixtures("one_cpu_process")
@pytest.mark.parametrize(("file", "change", "said"), ALIEN.values(), ids=ALIEN)
def test_a_file_that_no_run_writes_is_named(output_dir, file, change, said):
    exchange(output_dir / "checkpoint-5", file, change)
    with pytest.raises(ValueError, match=rf"checkpoint-5/{Path(file).stem}\b.*\.$") as caught:
        Run().restore(output_dir)
    assert said in str(caught.value) and "\n" not in str(caught.value)


# What restoring alone does not read.
STRANGE = {
    "base": ("scheduler.json", fields(base_lrs=None)),
    "counts": ("trainer.json", fields(progress={"step": 1, "tokens": 10**400})),
    "generator": ("rank_0.safetensors", tensors(lambda tensor: tensor.repeat(2))),
    "config": ("config.json", text("{}")),
}


@pytest.mark.parametrize(("file", "change"), STRANGE.values(), ids=STRANGE)
def test_a_run_does_not_go_on_from_values_that_no_run_writes(run, trained, tmp_path, capsys, file, change):
    folder = trained("llama").copy(tmp_path / "a")
    forget_the_end(folder, 8)
    exchange(folder / "checkpoint-4", file, change)
    assert run("a", *EVERY_FOURTH)[0] == 2
    assert f"checkpoint-4/{Path(file).stem}" in capsys.readouterr().err
