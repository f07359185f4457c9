"""Runs the suites on one model one after another, and reports."""

import time
from pathlib import Path

from hope_hf.cli.process import complain, is_first_process, memory_is_full

from .archive import archive, archive_folder
from .arguments import Arguments
from .checkpoints import as_checkpoint
from .numbers import numbers
from .parsing import names
from .report import as_json, as_markdown, check_folder, make_record, write_report
from .result import SuiteResult
from .subject import Subject, load_subject
from .suites import NEEDS_MEMORY, SUITES, WITHOUT_SUBJECT
from .tracking import Trackers


def evaluate(args: Arguments, trackers: Trackers) -> int:
    """Load the model, run the suites of `--suite` and write the report; returns 0, or 1 if a suite could not run.

    Raises ValueError for a folder that cannot be written, and a model that cannot be loaded.
    """
    check_folder(args.output_dir)
    kept = archive_folder(args.archive_dir, args.model_name_or_path) if args.archive_dir else None
    asked = names(args.suite)
    start = time.perf_counter()
    subject = load_subject(args) if any(name not in WITHOUT_SUBJECT for name in asked) else None
    results, failed = _run_suites(args, subject, asked)
    if results and is_first_process():
        record = make_record(args, subject, results, failed, time.perf_counter() - start)
        try:
            if kept:
                print(f"Archived: {archive(as_json(record), kept)}")
            if args.output_dir:
                print(f"Report: {write_report(args.output_dir, record, results)}")
                pictures = [Path(args.output_dir) / file for result in results.values() for file in result.pictures]
                pictures = [path for path in pictures if path.exists()]
                trackers.log(numbers(record["results"]), pictures, as_checkpoint(args.model_name_or_path or ""))
        except ValueError as error:
            return complain(error, 1)
    return 1 if failed else 0


def _run_suites(
    args: Arguments, subject: Subject | None, asked: list[str]
) -> tuple[dict[str, SuiteResult], dict[str, str]]:
    """The results of the suites that ran, and a sentence for each that could not."""
    results, failed = {}, {}
    for name in asked:
        try:
            if name in NEEDS_MEMORY and not subject.has_memory:
                raise ValueError(
                    f"--suite {name} looks into self-modifying memories, and {args.model_name_or_path} "
                    f"({subject.model.config.model_type}) has none: leave it out."
                )
            results[name] = SUITES[name](args, subject)
        except ValueError as error:
            failed[name] = str(error)
            complain(error, 1)
            continue
        except (RuntimeError, MemoryError) as error:
            if not memory_is_full(error):
                raise
            reason = str(error).splitlines()[0]
            failed[name] = f"--suite {name}: the memory does not hold it, lower --batch_size or --lengths ({reason})."
            complain(failed[name], 1)
            continue
        if is_first_process():
            print(f"\n{as_markdown(name, results[name])}", flush=True)
    return results, failed
