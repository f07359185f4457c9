"""The command line of checkpoints: `hope-hf checkpoints info|verify|consolidate DIR`."""

import json
import os
import shutil
import uuid
from pathlib import Path

from safetensors import SafetensorError

from hope_hf.common.flags import Checked, check_output
from hope_hf.common.parser import Parser
from hope_hf.common.program import printed, program
from hope_hf.common.results import markdown_table

from .manifest import Manifest, file_size, latest_checkpoint, read_manifest, verify

# Files that only a continued run needs.
STATE_FILES = ("optimizer", "scheduler.", "trainer.", "rank_", "manifest.")


def make_parser() -> Parser:
    """All commands and flags."""
    parser = Parser(
        (),
        prog="hope-hf checkpoints",
        description="Look at checkpoints, verify them, or join the parts of one into a model.",
        example="hope-hf checkpoints consolidate runs/pilot --to pilot",
        link="docs/running.md",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="info|verify|consolidate")
    for name, text in (
        ("info", "say what a checkpoint holds, without reading all of it"),
        ("verify", "read every byte and compare it with the manifest"),
        ("consolidate", "verify, then copy what `from_pretrained` loads to a new folder; join weights in parts"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        text = "a checkpoint, or a run's folder for its newest complete one"
        command.add_argument("dir", metavar="DIR", action=Checked, help=text)
        if name == "consolidate":
            command.add_argument("--to", metavar="OUT", action=Checked, required=True, help="a new folder")
    return parser


@program
def main(argv: list[str]) -> int:
    """Returns 0, or 2 after a mistake of the user or for a checkpoint that is not complete."""
    options = make_parser().parse_args(argv)
    if options.command == "consolidate":
        check_output(options.to, "--to")
        if os.path.lexists(options.to):
            raise ValueError(f"--to {options.to} exists: name a new folder.")
    folder = Path(options.dir)
    if not os.path.isdir(folder):
        raise ValueError(f"{folder} is not a folder: name a checkpoint-<step>, or the --output_dir of a run.")
    if not folder.name.startswith("checkpoint-"):
        newest = latest_checkpoint(folder)
        folder = folder if newest is None else newest.folder
    if options.command == "info":
        print(_info(folder))
        return printed()
    manifest = verify(folder)
    count = len(manifest.files)
    print(f"{folder} is whole: step {manifest.step}, {count} files, {manifest.size:,} bytes.")
    if options.command == "consolidate":
        _consolidate(manifest, Path(options.to))
    return 0


def _info(folder: Path) -> str:
    try:
        manifest = read_manifest(folder)
        file_size(folder, "trainer.json")
        state = json.loads(manifest.path("trainer.json").read_text(encoding="utf-8"))
        facts = {"step": manifest.step, "num_processes": manifest.facts["num_processes"], **state}
        # The flags and the counters of the run are nested dicts.
        for name, value in list(facts.items()):
            if isinstance(value, dict):
                facts |= facts.pop(name)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ValueError(
            f"{folder} is not a finished checkpoint: its manifest.json or trainer.json cannot be read."
        ) from None
    rows = []
    for name, value in facts.items():
        if value is not None:
            rows.append({"what": name, "value": str(value)})
    rows.append({"what": "size", "value": f"{manifest.size:,} bytes in {len(manifest.files)} files"})
    return f"{folder}\n\n{markdown_table(rows)}"


def _consolidate(manifest: Manifest, out: Path):
    folder = manifest.folder
    parts = {path.name for path in manifest.part_files()}
    if not parts:
        # Loading the copy would follow its index wherever it points.
        manifest.weight_files()
    wanted = [name for name in manifest.files if not name.startswith(STATE_FILES) and name not in parts]
    unfinished = out.with_name(f"{out.name}.tmp-{uuid.uuid4().hex[:8]}")
    try:
        for name in wanted:
            (unfinished / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(folder / name, unfinished / name)
        if parts:
            # Not at the top: torch takes seconds to be imported, and only parts are joined with it.
            from .weights import join

            join(manifest, unfinished)
        unfinished.rename(out)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"--to {out} cannot be written: {reason}.") from None
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    print(f"{out} holds the model: AutoModelForCausalLM.from_pretrained({str(out)!r})")
