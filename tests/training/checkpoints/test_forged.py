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


def tensors(change: Callable[[torch.Tensor], torch.Tensor], **more: torch.Tensor) -> Change:
    def write(path: Path):
        changed = {name: change(tensor) for name, tensor in load_file(path).items()}
        save_file(changed | more, path)

    return write


def exchange(folder: Path, file: str, change: Change):
    """Change a file of a checkpoint, and seal the manifest as if a run had written it."""
    change(folder / file)
    forge(folder, files=describe(folder, [folder / name for name in read_manifest(folder).files]))


TEXTS = {"empty": "", "number": "5", "null": "null", "deep": "[" * 9999}
JSONS = ["scheduler.json", "trainer.json", "rank_0.json", "optimizer.json", "optimizer_rank_0.json"]
STATE = "optimizer_rank_0.safetensors"
ALIEN = {
    **{f"{file}-{name}": (file, text(content)) for file in JSONS for name, content in TEXTS.items()},
    **{f"{file}-cut": (file, cut) for file in ("model.safetensors", "rank_0.safetensors", STATE)},
    **{f"{file}-empty": (file, text("")) for file in ("model.safetensors", "rank_0.safetensors", STATE)},
    "list": ("optimizer.json", text("[]")),
    "tensor": ("rank_0.json", text('{"rng": {"$tensor": "x"}}')),
    "parts": ("rank_0.json", fields(carried=5)),
    "position": ("rank_0.json", fields(data={"rows": -1})),
    # An optimizer cast it, and took what it did not know.
    "double": (STATE, tensors(torch.Tensor.double)),
    "int8": (STATE, tensors(lambda tensor: tensor.to(torch.int8))),
    "longer": (STATE, tensors(lambda tensor: tensor.repeat(2))),
    "extra": (STATE, tensors(torch.clone, extra=torch.zeros(3))),
    "extra-key": (STATE, tensors(torch.clone, **{"lm_head.weight:extra": torch.zeros(512)})),
}


@pytest.mark.usefixtures("one_cpu_process")
@pytest.mark.parametrize("case", ALIEN)
def test_a_file_that_no_run_writes_is_named(output_dir, case):
    file, change = ALIEN[case]
    exchange(output_dir / "checkpoint-5", file, change)
    with pytest.raises(ValueError, match=rf"checkpoint-5/{Path(file).stem}\b.*\.$") as caught:
        Run().restore(output_dir)
    assert "\n" not in str(caught.value)


SCHEDULE = {"kind": "cosine", "warmup": 0, "end": 5}
STRANGE = {
    "base": ("scheduler.json", fields(base_lrs=None)),
    "number": ("trainer.json", fields(schedule=5)),
    "settings": ("trainer.json", fields(schedule=SCHEDULE | {"settings": {"x": 1}})),
    "flags": ("trainer.json", fields(identity=[])),
    "counts": ("trainer.json", fields(progress={"step": 1, "tokens": 10**400})),
    "generator": ("rank_0.safetensors", tensors(lambda tensor: tensor.repeat(2))),
    "config": ("config.json", text("null")),
    "other": ("config.json", text("{}")),
}


@pytest.mark.parametrize("case", STRANGE)
def test_a_run_does_not_go_on_from_values_that_no_run_writes(run, trained, tmp_path, capsys, case):
    folder = trained("llama").copy(tmp_path / "a")
    forget_the_end(folder, 8)
    file, change = STRANGE[case]
    exchange(folder / "checkpoint-4", file, change)
    assert run("a", *EVERY_FOURTH)[0] == 2
    assert f"checkpoint-4/{Path(file).stem}" in capsys.readouterr().err
