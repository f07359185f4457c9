"""Files and folders that flags name, looked for before anything is imported that takes seconds.

The run itself checks and reads all of them: here the same functions find what is missing.
"""

import os
from dataclasses import fields
from pathlib import Path

from hope_hf.common.flags import require_local
from hope_hf.common.names import PRESETS
from hope_hf.common.parser import nearest
from hope_hf.common.run_arguments import FLAGS, Arguments
from hope_hf.data import DataConfig, require_texts

from .checkpoints.manifest import checkpoints_in, no_latest, read_manifest
from .checkpoints.run_folder import record_in

# Of these the content decides whether two runs are the same, which is read later.
READ_LATER = ("model_name_or_path", "level_optimizers")


def check_places(args: Arguments) -> None:
    """ValueError for a file or folder that does not exist, and for an output folder of another run."""
    folder = Path(args.output_dir)
    identity = args.identity()
    for name in READ_LATER:
        del identity[name]
    record = record_in(folder, identity, args.changeable())
    if record is not None and record["complete"]:
        # Its text is not read again, and may be gone.
        return
    if args.resume_from_checkpoint is not None:
        _check_resume(folder, args.resume_from_checkpoint)
    check_text_and_model(args)


def check_text_and_model(args: Arguments) -> None:
    """ValueError for a text, model or tokenizer that is meant as a path and does not exist, and for two texts."""
    _check_data(args)
    require_texts(args)
    for flag in ("model_name_or_path", "tokenizer_name"):
        if getattr(args, flag):
            require_local(getattr(args, flag), f"--{flag}")
    if args.config_name and args.config_name not in PRESETS and not nearest(args.config_name, PRESETS):
        require_local(args.config_name, "--config_name")


def _check_data(args: Arguments) -> None:
    """ValueError for flags of the data that exclude each other."""
    # A model brings its tokenizer.
    given = {"tokenizer_name": args.model_name_or_path}
    for field in fields(DataConfig):
        value = getattr(args, field.name) if field.name in FLAGS else None
        if value is not None:
            given[field.name] = value
    DataConfig(**given)


def _check_resume(folder: Path, named: str) -> None:
    # A run with checkpoints of its own goes on from these, also where the one that it began from is gone.
    if checkpoints_in(folder):
        return
    if named == "latest":
        raise no_latest(folder)
    if not os.path.isdir(named):
        try:
            read_manifest(Path(named))
        except ValueError as error:
            raise ValueError(f"--resume_from_checkpoint: {error}") from None
