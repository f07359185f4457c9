"""The command line: `hope-hf convert --from MODEL --output_dir DIR`."""

import sys
from argparse import SUPPRESS, Namespace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from hope_hf.common.files import require_new
from hope_hf.common.flags import Bounds, Checked, ModelArguments, check_output, parse_numbers, require_local
from hope_hf.common.parser import Parser
from hope_hf.common.process import print_error, return_freed_memory
from hope_hf.common.program import importing, program

from .changes import WORKS, Changes

if TYPE_CHECKING:
    from hope_hf import HopeConfig

# Sinks of a new window: without the first four a pretrained model fails beyond it.
SINKS = 4
# Of 512 and 1,024 tokens the one whose losses are lower on two novels (`benchmarks/levels.py widths`).
WINDOW = 1024
# The check needs a text within the window.
LEAST_WINDOW = 64


def make_parser() -> Parser:
    """All flags."""
    parser = Parser(
        (),
        prog="hope-hf convert",
        description=f"Turn a pretrained model into a HOPE with the same logits ({WORKS}).",
        example="hope-hf convert --from HuggingFaceTB/SmolLM2-135M --output_dir models/smol",
        link="docs/convert.md",
        allow_abbrev=False,
    )
    add = partial(parser.add_argument, action=Checked)
    add("model", metavar="MODEL", nargs="?", default=SUPPRESS, help="folder or Hub name of the model")
    add("--from", dest="source", metavar="MODEL", help="the same")
    add("--gguf_file", metavar="FILE", help="a GGUF file in it, instead of its safetensors")
    add("--adapter", metavar="DIR", help="a PEFT adapter of it, to be merged; with a HOPE: to be converted")
    add("--output_dir", metavar="DIR", required=True, help="a new folder for the HOPE")
    add("--levels", metavar="N,N", help="cut each MLP into parallel levels with these periods, in tokens")
    add("--memory_layers", metavar="N,N", help="replace attention in these layers by memories, to be trained")
    bounds = Bounds(least=LEAST_WINDOW)
    window = f"let attention see the last N tokens only (without a number: {WINDOW})"
    add("--sliding_window", metavar="N", nargs="?", const=WINDOW, type=int, bounds=bounds, help=window)
    sinks = f"first tokens that are seen as well, with --sliding_window (default: {SINKS})"
    add("--attention_sinks", metavar="N", type=int, bounds=Bounds(least=0), help=sinks)
    add("--license", metavar="NAME", help="the Hub's name of the weights' licence (default: the source's)")
    return parser


@program
def main(argv: list[str]) -> int:
    """Convert. Returns 0, or 1 where the written model differs from its source, or 2 after a mistake of the user."""
    options = make_parser().parse_args(argv)
    name_or_path = _model(getattr(options, "model", None), options.source)
    check_output(options.output_dir, "--output_dir")
    if options.adapter is not None and options.gguf_file is not None:
        raise ValueError("--adapter is for a model in safetensors: leave --gguf_file out, or merge it beforehand.")
    changes = _changes(options)
    require_local(name_or_path, "--from")
    out = Path(options.output_dir)
    require_new(out, "--output_dir")
    # Not at the top: flags are read and files are looked for without torch, which takes seconds to be imported.
    with importing():
        import transformers

        from hope_hf.common.devices import set_up_cpu
        from hope_hf.common.models import is_hope, load_config

        from .check import CheckFailed
        from .folder import convert_folder

    if not sys.stderr.isatty():
        transformers.utils.logging.disable_progress_bar()
    set_up_cpu(None)
    return_freed_memory()
    if options.adapter is not None:
        config = load_config(name_or_path, "from", ModelArguments())
        if is_hope(config):
            return _adapt(options, name_or_path, config, out)
    try:
        converted = convert_folder(name_or_path, out, changes, options.gguf_file, options.license, options.adapter)
    except CheckFailed as error:
        return print_error(f"{str(error).rstrip('.')}; nothing was written.", 1)
    dtype = str(converted.dtype).removeprefix("torch.")
    agreement = converted.agreement
    print(
        f"{out} is complete and checked: {converted.parameters:,} parameters in {converted.files} file(s) of "
        f"{dtype}.\n"
        f"Compared with {converted.peer}.\n"
        f"Largest difference of a logit, over {agreement.tokens} tokens and behind padding: "
        f"{agreement.difference:.1e} (at most {agreement.tolerance:.1e} is accepted).\n"
        f"The most likely token is the same at all of them, and {agreement.new_tokens} greedy tokens after them are, "
        "too."
    )
    return 0


def _changes(options: Namespace) -> Changes:
    """What the flags change in the model."""
    if options.attention_sinks is not None and options.sliding_window is None:
        raise ValueError("--attention_sinks needs a window: add --sliding_window N or leave it out.")
    levels = parse_numbers(options.levels, "--levels", least=2)
    for fast, slow in pairwise(levels):
        if slow % fast:
            raise ValueError(
                f"--levels {options.levels} is not fast to slow in multiples: write each period as a multiple of "
                "the one before, such as 512,2048."
            )
    return Changes(
        levels=levels,
        memory_layers=parse_numbers(options.memory_layers, "--memory_layers", least=0),
        sliding_window=options.sliding_window,
        attention_sinks=SINKS if options.attention_sinks is None else options.attention_sinks,
    )


def _adapt(options: Namespace, name_or_path: str, config: "HopeConfig", out: Path) -> int:
    """Turn an adapter of the source into one of a model that was converted before."""
    for name in ("levels", "memory_layers", "sliding_window", "license"):
        if getattr(options, name) is not None:
            raise ValueError(f"--{name} is for a new model, and {name_or_path} is a HOPE already: leave it out.")
    from .adapter import convert_adapter

    maps = convert_adapter(options.adapter, name_or_path, config, out)
    print(f"{out} is complete: an adapter of {name_or_path}, of {maps} linear maps.")
    return 0


def _model(word: str | None, flag: str | None) -> str:
    """The model that is named, with or without `--from`."""
    if word is None and flag is None:
        raise ValueError("The model is missing: name a folder or a Hub name, hope-hf convert MODEL --output_dir DIR.")
    if word is not None and flag is not None:
        raise ValueError(f"MODEL is {word} and --from is {flag}: name the model once.")
    return word or flag
