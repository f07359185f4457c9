"""The command line: `hope-hf export DIR --to OUT [--push_to_hub REPO_ID]`."""

import os
import sys
from argparse import Namespace
from functools import partial
from pathlib import Path

from hope_hf.common.files import require_new
from hope_hf.common.flags import Checked, check_output, check_repo_id
from hope_hf.common.parser import Parser
from hope_hf.common.process import print_error
from hope_hf.common.program import importing, program

from .card_license import DEFAULT_LICENSE


def make_parser() -> Parser:
    """All flags."""
    parser = Parser(
        (),
        prog="hope-hf export",
        description="Make a folder for the Hub, check it, and upload it.",
        example="hope-hf export runs/pilot --to exports/pilot --push_to_hub owner/name",
        link="docs/fine_tuning.md",
        allow_abbrev=False,
    )
    add = partial(parser.add_argument, action=Checked)
    add("dir", metavar="DIR", help="a run's output folder, or another with a saved HOPE")
    add("--to", metavar="OUT", required=True, help="a new folder for the export")
    add("--push_to_hub", metavar="REPO_ID", help="upload it to this repository (owner/name)")
    parser.add_argument("--private", action="store_true", help="make the repository private, if it is new")
    add("--license", help=f"of the weights (default: that of DIR's README.md, or {DEFAULT_LICENSE})")
    add("--results", metavar="FILE", help="results.json of hope-hf eval (default: DIR's, if there)")
    return parser


@program
def main(argv: list[str]) -> int:
    """Export, and upload if asked. Returns 0, or 1 where check or upload failed, or 2 after a mistake of the user."""
    options = make_parser().parse_args(argv)
    _check(options)
    # Not at the top: flags are read and files are looked for without torch, which takes seconds to be imported.
    with importing():
        import transformers

        from .folder import ExportFailed, export_folder

    if not sys.stderr.isatty():
        transformers.utils.logging.disable_progress_bar()
    out = Path(options.to)
    repo_id = options.push_to_hub or out.resolve().name
    results = Path(options.results) if options.results else None
    try:
        printed = export_folder(Path(options.dir), out, repo_id, options.license, results)
        print(f"The example on the card prints:\n{printed}\n{out} is complete and checked.", flush=True)
        if options.push_to_hub:
            _push(out, repo_id, options.private)
    except ExportFailed as error:
        return print_error(error, 1)
    return 0


def _check(options: Namespace) -> None:
    """ValueError for mistakes that the flags alone show, and for files and folders that do not exist."""
    if options.push_to_hub is not None:
        check_repo_id(options.push_to_hub, "--push_to_hub")
    elif options.private:
        raise ValueError("--private needs an upload: add --push_to_hub REPO_ID or leave it out.")
    if not os.path.isdir(options.dir):
        raise ValueError(f"{options.dir} is not a folder: name that of a finished run or of another saved HOPE.")
    if options.results and not os.path.isfile(options.results):
        raise ValueError(f"--results {options.results} is not a file: name a results.json of hope-hf eval.")
    check_output(options.to, "--to")
    require_new(Path(options.to), "--to")


def _push(out: Path, repo_id: str, private: bool):
    from .folder import ExportFailed
    from .network import upload

    try:
        print(f"Uploaded to {upload(out, repo_id, private)}")
    except ExportFailed as error:
        again = f"{out} is complete, `hf upload {repo_id} {out}` tries again."
        raise ExportFailed(f"{str(error).rstrip('.')}; {again}") from error
