"""Levels that learn while they read: what it brings, costs and risks.

    python benchmarks/levels.py novel --model DIR --novel FILE          one case
    python benchmarks/levels.py novel long segments --model DIR --novel FILE --results docs/results/levels.jsonl
    python benchmarks/levels.py --picture docs/levels.png               table and picture of what was measured

| case | what is read |
|---|---|
| novel | 16K tokens of a novel: frozen, learning, learning in all blocks |
| original | 8,192 tokens of a novel: full attention and a window, each frozen and learning |
| long | 64K tokens of Moby Dick: loss beyond 8K, memory of the process |
| book | 100K tokens of Moby Dick by `model.learn`: CPU time of a token and memory, at the beginning and at the end |
| segments | Shakespeare, WikiText, the novel, Python, Shakespeare again; beside training of all weights |
| dynamic | 4,096 tokens of the novel, beside dynamic evaluation: all weights by SGD at four rates |
| hostile | 8,192 tokens of nonsense, then 2,048 of the novel without learning |
| saved | 6,144 tokens of the novel, saved in three forms, and 2,048 more in a new process |
| classes | labelled sentences of CLINC150, group by group |
| widths | 16K tokens of the novel with windows of 512 and 1,024, each frozen and learning |
| window | 64K tokens of Moby Dick with a window of 512 tokens, 24K with 1,024; 16K without sinks |
| own | a HOPE with memories that was trained here, on held-out text, at four rates |

`--model` is a folder that `hope-hf convert` wrote, with a window; for `own` a run of run_clm.py. Rows are
appended to the results file as they are measured; of two rows of the same measurement, the later counts. Texts come
from the folder that --data_dir or HOPE_TEST_DATA names, with text/ and cls/, and the novel from --novel.
"""

import argparse
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.levels import books, cases, small, windows
from benchmarks.levels.bench import Bench
from benchmarks.levels.report import draw, table
from benchmarks.quality.program import finish
from benchmarks.quality.results import append, origin, read_rows
from hope_hf.common.devices import set_up_cpu
from hope_hf.common.results import provenance

CASES: dict[str, Callable[[Bench], Iterator[dict]]] = {
    "novel": cases.novel,
    "original": cases.original,
    "long": cases.long,
    "book": books.book,
    "segments": cases.segments,
    "dynamic": cases.dynamic,
    "hostile": cases.hostile,
    "saved": cases.saved,
    "classes": small.classes,
    "own": small.own,
    "window": windows.window,
    "widths": windows.widths,
}


def main(argv: list[str]) -> int:
    """Measure the cases, or draw. Returns 0, or 2 after a mistake of the user."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form, allow_abbrev=False)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--model", type=Path, help="folder of the model")
    parser.add_argument("--novel", type=Path, help="text file of a novel (default: Moby Dick of --data_dir)")
    parser.add_argument("--data_dir", type=Path, default=os.environ.get("HOPE_TEST_DATA"), help="folder with text/")
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"], help="of the weights")
    parser.add_argument("--shorten", type=int, default=1, help="divide all numbers of tokens by this")
    parser.add_argument("--results", type=Path, default=Path("runs/levels.jsonl"))
    parser.add_argument("--picture", type=Path, help="draw loss by position of the case original into this file")
    parser.add_argument("--read_on", type=Path, help=argparse.SUPPRESS)
    return finish(_main, parser.parse_args(argv))


def _main(options: argparse.Namespace) -> int:
    for name in options.cases:
        if name not in CASES:
            names = ", ".join(CASES)
            raise ValueError(f"{name} is no case: name some of {names}.")
    if options.cases:
        bench = _bench(options)
        set_up_cpu(1)
        if options.read_on:
            losses = cases.read_on(bench, options.read_on)
            print(json.dumps(losses))
            return 0
        about = _about(bench)
        for name in options.cases:
            for row in CASES[name](bench):
                row = {"case": name} | row
                print(json.dumps(row), flush=True)
                append(options.results, row | about)
    rows = read_rows(options.results, _checked, "measurement")
    print(table(rows))
    if options.picture:
        draw(rows, options.picture)
    return 0


def _checked(row: dict) -> dict:
    """A row of the results file; KeyError if it has no case, or nothing that was measured."""
    return row | {"case": row["case"], "what": row["what"]}


def _bench(options: argparse.Namespace) -> Bench:
    for flag in ("model", "data_dir"):
        if getattr(options, flag) is None:
            raise ValueError(f"--{flag} is missing: name a folder.")
    if not (options.model / "config.json").is_file():
        raise ValueError(f"--model {options.model} has no config.json: name a folder of hope-hf convert.")
    if options.shorten < 1:
        raise ValueError(f"--shorten is {options.shorten}: it must be at least 1.")
    novel = options.novel or options.data_dir / "text/gutenberg_2701_moby_dick.txt"
    return Bench(options.model, options.data_dir, novel, options.dtype, options.shorten)


def _about(bench: Bench) -> dict:
    """Where the rows of a call come from."""
    facts = provenance()
    versions = facts["versions"]
    facts["versions"] = {name: versions[name] for name in ("python", "torch", "transformers")}
    return {
        "model": bench.model.name,
        "text": bench.novel.name,
        "dtype": bench.dtype,
        **origin(facts),
    }
