"""`--push_to_hub`: uploads the finished run to the Hub, or warns."""

import shutil
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory

import huggingface_hub

from hope_hf.cli.models import is_hope
from hope_hf.cli.process import warn_once
from hope_hf.export import ExportFailed, export_folder, upload
from hope_hf.step.arguments import Arguments

from .parsing import repo_id

PLACE = ".hub-"
"""Begins the name of the folder for an upload, in the run's folder."""


def check_push(args: Arguments, config):
    """Before the training: ValueError for a model that is no HOPE, a warning where there is no login yet."""
    if not is_hope(config):
        raise ValueError(f"--push_to_hub uploads a HOPE and this is a {config.model_type}: train without it.")
    if huggingface_hub.get_token() is None:
        warn_once("--push_to_hub finds no login: run `hf auth login` before the training ends.")


def push(args: Arguments):
    """Export the finished run in `--output_dir` and upload it; any failure is a warning."""
    try:
        for left in Path(args.output_dir).glob(f"{PLACE}*"):
            # Of a process that was killed.
            shutil.rmtree(left, ignore_errors=True)
        with TemporaryDirectory(dir=args.output_dir, prefix=PLACE) as place:
            out = Path(place) / "export"
            export_folder(Path(args.output_dir), out, repo_id(args))
            print(f"Uploaded to {upload(out, repo_id(args), args.hub_private_repo)}", flush=True)
    except (ValueError, ExportFailed, OSError) as error:
        reason = str(error).rstrip(".")
        warnings.warn(
            f"--push_to_hub failed and the run in {args.output_dir} is complete: {reason}; "
            "the same command tries again.",
            stacklevel=2,
        )
