"""One program, `hope-hf`: it finds the command that is named, and hands it the other words.

Nothing is imported at the top: a program's flags are read before torch and transformers, whose imports take seconds.
"""

import difflib
import sys
from collections.abc import Callable

COMMANDS = {
    "train": "train a causal language model, HOPE unless another is named",
    "eval": "evaluate a model: perplexity, memory, needles, published benchmarks",
    "generate": "continue a text",
    "chat": "talk to a model that learns from what it reads",
    "plan": "tell whether a run fits, how long it takes and what it costs",
    "prepare": "tokenize a mixture of corpora into shards",
    "tokenizer": "train a tokenizer",
    "convert": "turn a pretrained Llama, Mistral, Qwen2 or Qwen3 into a HOPE",
    "retain": "let layers with a window retain the older tokens that questions look up",
    "export": "make a folder for the Hub, and upload it",
    "checkpoints": "look at checkpoints, verify them, join their parts",
    "plot": "draw the curves of one or more runs",
    "recipes": "list the recipes that come with the package, or copy one",
    "launch-files": "list accelerate's launch files that come with the package, or copy one",
}
_LINES = "\n".join(f"  {name:14}{what}" for name, what in COMMANDS.items())
HELP = f"""usage: hope-hf COMMAND ...

HOPE, the language model whose memories learn while they read.

commands:
{_LINES}

hope-hf COMMAND --help lists the flags of a command; hope-hf --version prints the version.

example: hope-hf train --output_dir runs/demo
more: README.md
"""


def main(argv: list[str] | None = None) -> int:
    """Run the command that `argv` (default: the process's words) begins with; returns its exit status.

    Without a command it prints the help; 2 after a command that does not exist.
    """
    name, *words = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if name in COMMANDS:
        return program(name)(words)
    if name in ("-h", "--help"):
        # In one piece: a pipe such as `| head` may end after it.
        print(HELP, end="")
        return 0
    if name == "--version":
        from hope_hf import __version__

        print(__version__)
        return 0
    near = difflib.get_close_matches(name, COMMANDS, n=1)
    hint = f"; did you mean {near[0]}?" if near else ":"
    print(f"error: hope-hf has no command {name!r}{hint} hope-hf --help lists them.", file=sys.stderr)
    return 2


def program(name: str) -> Callable[[list[str]], int]:
    """The `main(argv)` of a command."""
    match name:
        case "train":
            from hope_hf.training import main
        case "eval":
            from hope_hf.evaluation import main
        case "chat":
            from hope_hf.chat import main
        case "generate":
            from hope_hf.chat import generate as main
        case "plan":
            from hope_hf.plan import main
        case "prepare":
            from hope_hf.data import prepare

            main = prepare.main
        case "tokenizer":
            from hope_hf.data import tokenizer

            main = tokenizer.main
        case "convert":
            from hope_hf.convert import main
        case "retain":
            from hope_hf.retain import main
        case "export":
            from hope_hf.export import main
        case "checkpoints":
            from hope_hf.training import look_at_checkpoints as main
        case "recipes":
            from hope_hf.common.packaged import recipes as main
        case "launch-files":
            from hope_hf.common.packaged import launch_files as main
        case "plot":
            from hope_hf.training import plot as main
    return main
