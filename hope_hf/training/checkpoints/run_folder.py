"""`run.json` identifies a folder's run, so that no other run overwrites it and a finished run is not repeated."""

import json
import os
import re
import shlex
import uuid
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from hope_hf.common.defaults import Default
from hope_hf.common.files import RUN_FILE, TEXT_FILES, read_small, replace_text, write_errors
from hope_hf.common.folder_lock import FolderLock
from hope_hf.common.results import command_to_keep, commands_of, provenance
from hope_hf.common.run_arguments import Arguments

from .manifest import MANIFEST, remove_leftovers

# Not imported: whether a folder holds another run is read before accelerate, which takes seconds to be imported.
if TYPE_CHECKING:
    from accelerate import Accelerator, PartialState

# A key of an identity beside the flags: the weights that the run began from.
WEIGHTS = "weights of the model"
_MODEL = "model_name_or_path"
# What the file of --level_optimizers holds.
OPTIONS = "content of level_optimizers"
# What does not decide whether two runs are the same.
INFORMATION = Arguments.PLACES | {TEXT_FILES}
# A folder that holds one of these without a run.json is not a run's.
OURS = ("config.json", "model.safetensors", "model.safetensors.index.json", "tokenizer.json", "metrics.jsonl")


class RunFolder:
    """The output folder of one run. All processes call the methods; rank 0 reads and writes, all get the result.

    A context manager: from `check` on, no other process can train in the folder until the context is left. With
    `only_looks` nothing is written, and the folder is neither made nor locked.
    """

    def __init__(self, output_dir: str, accelerator: "Accelerator", only_looks: bool = False):
        self.path = Path(output_dir)
        self._accelerator = accelerator
        self._only_looks = only_looks
        self._lock = FolderLock(self.path)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self._lock.release()

    def check(self, identity: dict, changeable: Collection[str] = ()) -> dict | None:
        """The record of the run in this folder, or None for a new one; locks the folder if there is work to do.

        The run may differ from `identity` in the keys `changeable`.

        Folders that a killed process left half written or half deleted are removed.

        Raises ValueError if the folder is another run's, or another process trains in it. Keys missing on one side
        (the data's fingerprint, before the data are read) are not compared.
        """

        return on_first_process(self._accelerator, partial(self._take, identity, changeable))

    def _take(self, identity: dict, changeable: Collection[str]) -> dict | None:
        record = self._read(identity, changeable)
        if self._only_looks:
            return record
        if record is None or is_open(record, identity):
            self._lock.acquire()
            # Checked again: the process that held the lock may have finished the run.
            record = self._read(identity, changeable)
        if record is not None:
            remove_leftovers(self.path, record["run_id"])
        return record

    def open(
        self,
        identity: dict,
        defaults: dict[str, Default] | None = None,
        changeable: Collection[str] = (),
        begun_from: str | None = None,
        keep_every: int | None = None,
    ) -> dict:
        """Check again with the whole identity and write the record of a new run (with `defaults`) or a changed one.

        `begun_from`: the folder of `--resume_from_checkpoint` where it is another run's. `keep_every`: checkpoints of
        these steps stay for good, also under later commands without it. A changed run keeps all its commands.
        """

        new = partial(self._new_record, identity, defaults or {}, begun_from)
        return on_first_process(self._accelerator, partial(self._open, identity, changeable, new, keep_every))

    def _open(
        self, identity: dict, changeable: Collection[str], new: Callable[[], dict], keep_every: int | None
    ) -> dict:
        before = self._read(identity, changeable)
        record = new() if before is None else _continued_record(before, identity)
        if keep_every is not None:
            record["keep_every"] = sorted({*record.get("keep_every", ()), keep_every})
        if record != before and not self._only_looks:
            self._write(record)
        return record

    def _new_record(self, identity: dict, defaults: dict[str, Default], begun_from: str | None) -> dict:
        record = {"identity": identity, "complete": False, "run_id": uuid.uuid4().hex[:12], **provenance()}
        record["num_processes"] = self._accelerator.num_processes
        record["defaults"] = {name: default.value for name, default in defaults.items()}
        if begun_from is not None:
            record |= {"begun_from": begun_from, "origin": origin_of(begun_from)}
        return record

    def close(self, record: dict):
        """Mark the run as complete."""
        if self._accelerator.is_main_process:
            self._write({**record, "complete": True})

    def _read(self, identity: dict, changeable: Collection[str]) -> dict | None:
        """The record in the folder, if it is of a run with this identity; None for a new folder."""
        return record_in(self.path, identity, changeable)

    def _write(self, record: dict):
        with write_errors(f"--output_dir {self.path}"):
            self.path.mkdir(parents=True, exist_ok=True)
            replace_text(self.path / RUN_FILE, json.dumps(record, indent=2) + "\n")


def record_in(folder: Path, identity: dict, changeable: Collection[str]) -> dict | None:
    """The record in a run's folder, if it is of a run with this identity; None for a new folder."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--output_dir {folder} is a file: name a folder.")
    if not (folder / RUN_FILE).exists():
        for path in (*map(folder.joinpath, OURS), *folder.glob("checkpoint-*")):
            if path.exists():
                raise ValueError(
                    f"--output_dir {folder} holds {path.name} but no {RUN_FILE}: choose an empty or new folder."
                )
        return None
    record = read_record(folder)
    has_checkpoint = record["complete"] or any(folder.glob("checkpoint-*"))
    # of a run that was changed, the first command is refused as well
    program, *flags = map(str, commands_of(record)[-1])
    # The shell finds the console command, wherever pip has put it.
    if Path(program).name == "hope-hf":
        program = "hope-hf"
    command = f" ({shlex.join([program, *flags])})"
    theirs = record["identity"]
    require_same_run(f"--output_dir {folder}", identity, theirs, changeable, has_checkpoint, command)
    return record


def _continued_record(record: dict, identity: dict) -> dict:
    """The record of a run that goes on; a changed run keeps all its commands."""
    if not is_open(record, identity):
        return dict(record)
    merged = record["identity"] | json.loads(json.dumps(identity))
    changed = {"identity": merged, "complete": False}
    if merged != record["identity"]:
        changed["commands"] = [*commands_of(record), command_to_keep()]
    return record | changed


def origin_of(folder: str | Path) -> str | None:
    """What identifies a checkpoint, or a run, wherever it lies; None if the folder holds neither."""
    manifest = Path(folder) / MANIFEST
    try:
        if os.path.isfile(manifest):
            return json.loads(read_small(manifest))["sha256"]
        return read_record(folder)["run_id"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def saved_defaults(output_dir: str, resume_from_checkpoint: str | None) -> dict[str, Default] | None:
    """The defaults of the run that is continued: in the folder, or of the checkpoint or run to resume; None if new."""
    folders = [Path(output_dir)]
    if resume_from_checkpoint not in (None, "latest"):
        folders += [Path(resume_from_checkpoint), Path(resume_from_checkpoint).parent]
    for folder in folders:
        # Not Path.is_file, which raises for a name that is too long.
        if os.path.isfile(folder / RUN_FILE):
            values = read_record(folder)["defaults"]
            return {name: Default(value, f"the value of this run, from {RUN_FILE}") for name, value in values.items()}
    return None


def read_record(folder: str | Path) -> dict:
    """The content of a run's `run.json`; ValueError if no run wrote it."""
    file = Path(folder) / RUN_FILE
    try:
        record = json.loads(read_small(file))
        for name, kind in {"identity": dict, "complete": bool, "defaults": dict}.items():
            if not isinstance(record[name], kind):
                raise TypeError(name)
        # It is part of the names of folders that the run deletes.
        if not re.fullmatch("[0-9a-z]+", record["run_id"]):
            raise ValueError("run_id")
        for value in record["defaults"].values():
            if not isinstance(value, int | float):
                raise TypeError("defaults")
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        raise ValueError(f"{file} cannot be read: choose another --output_dir, or delete the folder.") from None
    return record


def differences(ours: dict, theirs: dict) -> list[str]:
    """The keys in which two identities differ; those of one side are ignored, and places of files. The data last.

    Of the model that the run begins from, its weights decide and not its place, where both are known. Only a run that
    trains LoRA still needs them: under the same place they may have changed for the others.
    """
    ours = json.loads(json.dumps(ours))
    names = (ours.keys() & theirs.keys()) - INFORMATION
    if ours.get(WEIGHTS) is None or theirs.get(WEIGHTS) is None:
        names -= {WEIGHTS}
    elif ours[_MODEL] == theirs[_MODEL] and not ours.get("lora_rank"):
        names -= {WEIGHTS, _MODEL}
    else:
        names -= {_MODEL}
    if OPTIONS in names:
        names -= {"level_optimizers"}
    different = sorted(name for name in names if ours[name] != theirs[name])
    if "data" in different:
        different.remove("data")
        different.append("data")
    return different


def moved(ours: dict, theirs: dict) -> list[str]:
    """The flags whose files or folders have another place in two identities."""
    ours = json.loads(json.dumps(ours))
    places = (ours.keys() & theirs.keys()) & (Arguments.PLACES | {_MODEL})
    return sorted(name for name in places if ours[name] != theirs[name])


def is_open(record: dict, identity: dict) -> bool:
    """Whether there may be work to do for a run of this record and identity: at another place may be other text."""
    if not record["complete"]:
        return True
    theirs = record["identity"]
    return bool(differences(identity, theirs) or moved(identity, theirs))


def require_same_run(
    source: object,
    ours: dict,
    theirs: dict,
    changeable: Collection[str] = (),
    has_checkpoint: bool = True,
    command: str = "",
):
    """ValueError if the identity `ours` differs from that of the run in `source` in other keys than `changeable`.

    `command`: the run's command in brackets, if it is known.
    """
    for name in differences(ours, theirs):
        # Vectors of their own rate are groups of their own.
        regrouped = name == "vector_learning_rate" and None in (ours[name], theirs[name])
        if name in changeable and not regrouped:
            continue
        change = ""
        if not has_checkpoint:
            change = " or delete the folder, which holds no checkpoint,"
        elif name in Arguments.CHANGEABLE and not regrouped:
            change = " or give --resume_from_checkpoint latest to continue it with this change,"
        if name == "data":
            from hope_hf.data import difference_of_text

            difference = difference_of_text(theirs.get(TEXT_FILES, {}), ours.get(TEXT_FILES, {}))
            difference = difference or "the flags name the same data, but their text or tokenizer has changed"
            raise ValueError(
                f"{source} holds another run: {difference}; put it back to continue the run,{change} or begin one on "
                "the new text from these weights, with --model_name_or_path and another --output_dir."
            )
        if name == WEIGHTS:
            raise ValueError(
                f"{source} holds another run: --model_name_or_path {ours[_MODEL]} has other weights than "
                f"{theirs[_MODEL]} had when it began; name that model,{change} or choose another folder."
            )
        if name == "rows_per_step":
            raise ValueError(
                f"{source} holds another run: a step had {theirs[name]} rows and has {ours[name]} now; choose "
                "--per_device_train_batch_size and --gradient_accumulation_steps so that their product with the "
                f"number of processes is {theirs[name]},{change} or choose another folder."
            )
        raise ValueError(
            f"{source} holds another run: {name} was {theirs[name]!r} and is now {ours[name]!r}; "
            f"repeat its flags to continue it{command},{change} or choose another folder."
        )


def changes(names: list[str], before: dict, now: dict, step: int) -> list[str]:
    """A line for each changed place, and for each changed key that is no part of the schedule, after `step`."""
    is_same_text = before.get("data") == now.get("data")
    content = "with the same content" if is_same_text else "which is read from its first row on"
    lines = []
    for name in moved(now, before):
        lines.append(f"{name} was {before[name]} and is now {now[name]}, {content}.")
    for name in names:
        if name not in Arguments.SCHEDULE:
            lines.append(
                f"{name} was {before[name]} and is now {now[name]}: from step {step + 1} on the losses are not "
                "bit-equal to those without the change."
            )
    return lines


def on_first_process(process: "Accelerator | PartialState", function):
    """Call `function` on rank 0 and give its result, or its ValueError, to all processes."""
    result = problem = None
    if process.is_main_process:
        try:
            result = function()
        except ValueError as error:
            problem = str(error)
    from accelerate.utils import broadcast_object_list

    result, problem = broadcast_object_list([result, problem])
    if problem is not None:
        raise ValueError(problem)
    return result
