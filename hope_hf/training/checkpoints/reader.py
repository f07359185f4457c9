"""A run's whole state in one folder, from which it continues bit for bit.

    checkpoint-<step>/            appears complete, by a rename
        config.json, model.safetensors, tokenizer files     what `from_pretrained` loads
        model-rank<r>.safetensors                            instead, with `--save_sharded`: see `weights`
        optimizer.json, optimizer_rank_<r>.{json,safetensors}   see `optimizer`
        scheduler.json, trainer.json
        rank_<r>.{json,safetensors}                          random generators, data position, carried memories
        manifest.json                                        sizes and SHA-256 of all the others

Nothing is pickled, and files that the manifest does not list are not read. Checkpoints are written in `writer.py`, and
chosen and read here. Every process calls every function; processes agree on errors, so that none waits forever.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from accelerate import PartialState
from torch import Tensor

from .manifest import FORMAT, MANIFEST, Manifest, latest_checkpoint, no_latest, verify
from .run_folder import on_first_process, origin_of
from .state_files import SHARED_STATE, load_state, not_of_a_run


@dataclass(frozen=True)
class SavedRun:
    """A verified checkpoint, and the state that this process needs before model and data exist.

    Attributes:
        manifest: the checkpoint's manifest.
        state: the states by file, as given to `CheckpointWriter.save`; "rank" is this process's own, with None for the
            random generators if another number of processes wrote the checkpoint.
        rank: of the process whose state "rank" is.
    """

    manifest: Manifest
    state: dict[str, dict]
    rank: int = 0

    @property
    def identity(self) -> dict:
        """The flags and data of the run that wrote it; ValueError if it holds none."""
        identity = self.state["trainer"].get("identity")
        if not isinstance(identity, dict):
            raise not_of_a_run(self.path / "trainer.json", "it holds no flags")
        return identity

    @property
    def tokens(self) -> int:
        """Tokens that the model has read; ValueError if it holds no number of them."""
        progress = self.state["trainer"].get("progress")
        tokens = progress.get("tokens") if isinstance(progress, dict) else None
        if type(tokens) is not int:
            raise not_of_a_run(self.path / "trainer.json", f"tokens is {tokens!r}")
        return tokens

    @property
    def path(self) -> Path:
        """The checkpoint's folder."""
        return self.manifest.folder

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self.manifest.step


def find_checkpoint(
    output_dir: str | Path, resume_from_checkpoint: str | None, record: dict | None = None
) -> SavedRun | None:
    """Choose the checkpoint to continue from, verify every byte of it, and read the state that is needed first.

    Args:
        output_dir: the run's folder.
        resume_from_checkpoint: a checkpoint's folder, or a run's for its newest complete one; "latest": the newest
            complete one in `output_dir`; None: the same, if there is one.
        record: that of the run in `output_dir`. Once it has checkpoints of its own, its newest one is taken, if it
            began from `resume_from_checkpoint`, which may have been moved since.

    Raises:
        ValueError: the named one is not complete, or none is, or it carries memories of another number of processes.
    """
    process = PartialState()
    # One process chooses; the others use its choice, since a shared disk may look different to them.
    manifest = on_first_process(process, lambda: _choose(Path(output_dir), resume_from_checkpoint, record or {}))
    if manifest is None:
        return None
    path, facts = manifest.folder, manifest.facts
    if facts.get("format") != FORMAT:
        raise ValueError(
            f"{path} was written by another version of hope_hf (format {facts.get('format')}, this one reads "
            f"{FORMAT}): continue with that version, or begin from its weights with --model_name_or_path {path}."
        )
    if facts["only_model"]:
        raise ValueError(
            f"{path} holds the model alone (--save_only_model), so its run cannot be continued: begin another one "
            f"from it with --model_name_or_path {path} and a new --output_dir."
        )
    same_world = facts["num_processes"] == process.num_processes
    # State that all processes share (such as the number of rows read) is in any file; the data loader checks it.
    rank = process.process_index if same_world else 0
    rank_state = load_state(manifest, f"rank_{rank}")
    _require_rank_state(rank_state, path / f"rank_{rank}.json")
    if rank_state["carried"] and not same_world:
        raise ValueError(
            f"{path} carries the memories of {facts['num_processes']} processes and this run has "
            f"{process.num_processes}: launch it with --num_processes {facts['num_processes']}."
        )
    if not same_world:
        rank_state["rng"] = None
    state = {name: load_state(manifest, name) for name in SHARED_STATE}
    return SavedRun(manifest, state | {"rank": rank_state}, rank)


def _require_rank_state(state: dict, file: Path) -> None:
    """ValueError that names the file unless it holds the parts of a process's state."""
    carried, data = state.get("carried"), state.get("data")
    if not isinstance(carried, dict) or not all(isinstance(value, Tensor) for value in carried.values()):
        raise not_of_a_run(file, "carried is no dict of tensors")
    if not isinstance(state.get("rng"), dict):
        raise not_of_a_run(file, "rng is no dict")
    rows = data.get("rows") if isinstance(data, dict) else None
    is_stream = isinstance(data, dict) and "rows" not in data and "packers" in data
    if not is_stream and (type(rows) is not int or not 0 <= rows < 2**53):
        raise not_of_a_run(file, "data is no place in a text")


def other_run(output_dir: str | Path, resume_from_checkpoint: str | None) -> str | None:
    """The folder of `--resume_from_checkpoint`, absolute, if it is not in `output_dir`, but another run's."""
    if resume_from_checkpoint in (None, "latest"):
        return None
    named = os.path.realpath(resume_from_checkpoint)
    # A checkpoint may be on another disk, with a link to it here.
    for folder in (output_dir, *Path(output_dir).glob("checkpoint-*")):
        if Path(named).is_relative_to(os.path.realpath(folder)):
            return None
    return named


def _choose(output_dir: Path, resume_from_checkpoint: str | None, record: dict) -> Manifest | None:
    if resume_from_checkpoint in (None, "latest"):
        newest = latest_checkpoint(output_dir)
        if newest is None and resume_from_checkpoint == "latest":
            raise no_latest(output_dir)
        return newest
    newest = latest_checkpoint(output_dir)
    other = other_run(output_dir, resume_from_checkpoint)
    if other and newest is not None:
        origin = record.get("origin")
        began_there = "begun_from" in record and other == record["begun_from"]
        if began_there or (origin is not None and origin_of(other) == origin):
            return newest
        raise ValueError(
            f"--output_dir {output_dir} holds a run that did not begin from --resume_from_checkpoint "
            f"{resume_from_checkpoint}: choose a new folder."
        )
    if newest is not None and os.path.realpath(resume_from_checkpoint) == os.path.realpath(newest.folder):
        return newest
    try:
        named = _named(Path(resume_from_checkpoint))
    except ValueError as error:
        raise ValueError(f"--resume_from_checkpoint: {error}") from None
    if newest is not None and newest.step > named.step and not named.facts["only_model"]:
        raise ValueError(
            f"--resume_from_checkpoint {resume_from_checkpoint}: the run has gone on to {newest.folder.name}; "
            "give a new --output_dir to fork the run, latest to continue it, or delete the later checkpoints."
        )
    return named


def _named(folder: Path) -> Manifest:
    """The checkpoint in a folder, or the newest complete one of the run there."""
    # Unlike those of a Path, these take a name that is too long.
    if os.path.isdir(folder) and not os.path.exists(folder / MANIFEST) and any(folder.glob("checkpoint-*")):
        return latest_checkpoint(folder)
    # Not the link `latest`, which another run may move on while this one reads.
    return verify(Path(os.path.realpath(folder)) if os.path.islink(folder) else folder)
