"""A run's whole state in one folder, from which it continues bit for bit.

    checkpoint-<step>/            appears complete, by a rename
        config.json, model.safetensors, tokenizer files     what `from_pretrained` loads
        optimizer.json, optimizer_rank_<r>.{json,safetensors}   see `optimizer_files`
        scheduler.json, trainer.json
        rank_<r>.{json,safetensors}                          random generators, data position, carried memories
        manifest.json                                        sizes and SHA-256 of all the others

Nothing is pickled. Every process calls every function; processes agree on errors, so that none is left waiting.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .engine import Engine
from .manifest import latest_checkpoint, publish, remove_leftovers, rotate, temporary_name, verify
from .optimizer_files import load_optimizer, save_optimizer
from .state_files import load_state, restore_rng, rng_state, save_state


@dataclass(frozen=True)
class SavedRun:
    """A verified checkpoint as this process needs it before model and data exist.

    Attributes:
        path: the checkpoint's folder.
        step: optimizer steps done.
        trainer_state: as given to `save_checkpoint`.
        data_state: as this process gave it.
        carried: this process's carried memories by name, on the CPU; empty where none were given.
        rng: this process's random generators; None where another number of processes wrote the checkpoint.
    """

    path: Path
    step: int
    trainer_state: dict
    data_state: dict
    carried: dict[str, Tensor]
    rng: dict | None


def save_checkpoint(
    output_dir: str | Path,
    step: int,
    *,
    engine: Engine,
    tokenizer: PreTrainedTokenizerBase,
    scheduler: LRScheduler,
    trainer_state: dict,
    data_state: dict,
    carried: dict[str, Tensor] | None = None,
    save_total_limit: int | None = None,
) -> Path:
    """Write `output_dir/checkpoint-<step>`, then delete the oldest beyond `save_total_limit` (None keeps all).

    The engine gives the whole model and every process's part of the optimizer's state; tokenizer, scheduler and
    `trainer_state` are taken from the first process, `data_state`, `carried` and the random generators from each. The
    two states are plain values, not tensors.

    Returns:
        The folder. An existing one of the same step is replaced.

    Raises:
        ValueError: the disk is full or cannot be written; the checkpoints written before are intact.
    """
    output_dir = Path(output_dir)
    process = PartialState()
    folder = broadcast_object_list([temporary_name(output_dir, step)])[0]
    # All processes gather, so before anything that may fail on one of them.
    weights = engine.weights()

    def make_folder() -> None:
        if process.is_main_process:
            output_dir.mkdir(parents=True, exist_ok=True)
            remove_leftovers(output_dir)
            folder.mkdir()

    def write() -> None:
        own = {"rng": rng_state(), "data": data_state, "carried": carried or {}}
        save_state(folder / f"rank_{process.process_index}", own)
        save_optimizer(folder, engine, process.process_index)
        if process.is_main_process:
            # The names of the model as it runs: what some families rename for export could not be loaded strictly.
            engine.model.save_pretrained(folder, state_dict=weights, save_original_format=False)
            tokenizer.save_pretrained(folder)
            save_state(folder / "scheduler", scheduler.state_dict())
            save_state(folder / "trainer", trainer_state)

    def seal() -> None:
        if process.is_main_process:
            rotate(output_dir, publish(folder, step, {"num_processes": process.num_processes}), save_total_limit)

    for stage in (make_folder, write, seal):
        _together(stage, folder)
    return output_dir / f"checkpoint-{step}"


def find_checkpoint(output_dir: str | Path, resume_from_checkpoint: str | None) -> SavedRun | None:
    """Choose the checkpoint to continue from, verify every byte of it, and read what is needed first.

    Args:
        output_dir: of the run.
        resume_from_checkpoint: a checkpoint's folder; "latest": the newest complete one in `output_dir`; None: the
            same, where there is one.

    Raises:
        ValueError: the named one is not complete, or none is, or it carries memories of another number of processes.
    """
    process = PartialState()
    # One process reads; the others take its choice, whatever they see of a shared disk.
    choice: list = [None, None]
    if process.is_main_process:
        try:
            choice[0] = _choose(Path(output_dir), resume_from_checkpoint)
        except ValueError as error:
            choice[1] = str(error)
    path, problem = broadcast_object_list(choice)
    if problem is not None:
        raise ValueError(problem)
    if path is None:
        return None
    manifest = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
    same_world = manifest["num_processes"] == process.num_processes
    # What all processes have alike, such as the number of rows read, is in any file; the data say where it is not.
    own = load_state(path / f"rank_{process.process_index if same_world else 0}")
    if own["carried"] and not same_world:
        raise ValueError(
            f"{path} carries the memories of {manifest['num_processes']} processes on and this run has "
            f"{process.num_processes}: launch it with --num_processes {manifest['num_processes']}."
        )
    rng = own["rng"] if same_world else None
    return SavedRun(path, manifest["step"], load_state(path / "trainer"), own["data"], own["carried"], rng)


def restore_checkpoint(saved: SavedRun, *, engine: Engine, scheduler: LRScheduler) -> None:
    """Put the rest of a checkpoint, after `load_weights`, into a run that is prepared; random generators last of all.

    Raises:
        ValueError: the optimizer is not the one that was saved.
    """
    load_optimizer(saved.path, engine)
    scheduler.load_state_dict(load_state(saved.path / "scheduler"))
    if saved.rng is not None:
        restore_rng(saved.rng)


@torch.no_grad()
def load_weights(model: PreTrainedModel, folder: Path) -> None:
    """Copy the safetensors in `folder` into `model`, before an engine has taken it.

    Names, shapes and dtypes are the same, or nothing is changed.

    Raises:
        ValueError: names, shapes or dtypes differ.
    """
    index = folder / "model.safetensors.index.json"
    files = {"model.safetensors"}
    if index.exists():
        files = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    saved: dict[str, Tensor] = {}
    for file in sorted(files):
        saved |= load_file(folder / file)
    own = model.state_dict()
    # Tied weights lie in the file once.
    present = {own[name].data_ptr() for name in saved if name in own}
    differences = [f"{name} is only in the checkpoint" for name in saved if name not in own]
    differences += [
        f"{name} is only in the model" for name in own if name not in saved and own[name].data_ptr() not in present
    ]
    differences += [
        f"{name} is {_describe(saved[name])} in the checkpoint and {_describe(own[name])} in the model"
        for name in saved
        if name in own and _describe(saved[name]) != _describe(own[name])
    ]
    if differences:
        more = f" (and {len(differences) - 1} more)" if len(differences) > 1 else ""
        raise ValueError(
            f"{folder} does not fit this model, {differences[0]}{more}: repeat the flags of the run that wrote it."
        )
    for name, tensor in saved.items():
        own[name].copy_(tensor)


def _describe(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _choose(output_dir: Path, resume_from_checkpoint: str | None) -> Path | None:
    if resume_from_checkpoint not in (None, "latest"):
        path = Path(resume_from_checkpoint)
        verify(path)
        return path
    path = latest_checkpoint(output_dir)
    if path is None and resume_from_checkpoint == "latest":
        raise ValueError(
            f"--resume_from_checkpoint latest: {output_dir} holds no checkpoint, so leave the flag out to begin."
        )
    return path


def _together(stage: Callable[[], None], folder: Path) -> None:
    """Run `stage` on every process; where it fails on one, all give `folder` up and raise."""
    error = None
    try:
        stage()
    except Exception as caught:
        error = caught
    reason = None if error is None else getattr(error, "strerror", None) or str(error) or repr(error)
    reasons = [reason for reason in gather_object([reason]) if reason is not None]
    if reasons:
        sentence = _abandon(folder, reasons[0])
        # The tokenizers library reports a full disk as a bare Exception. Anything else is a mistake of ours.
        if error is None or isinstance(error, OSError | SafetensorError) or type(error) is Exception:
            raise ValueError(sentence) from None
        raise error


def _abandon(folder: Path, problem: str) -> str:
    """Give a full disk its space back; the sentence that says what is left."""
    sentence = None
    if PartialState().is_main_process:
        shutil.rmtree(folder, ignore_errors=True)
        try:
            last = latest_checkpoint(folder.parent)
        except ValueError:
            last = None
        sentence = (
            f"No checkpoint could be written in --output_dir {folder.parent} ({problem}): free space there or make it "
            f"writable, then continue; last good checkpoint: {last or 'none yet'}."
        )
    return broadcast_object_list([sentence])[0]


if __name__ == "__main__":
    import sys

    from .checkpoint_tool import main

    sys.exit(main(sys.argv[1:]))
