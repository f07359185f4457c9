"""Runs the suites on one model one after another, and reports."""

import traceback
from dataclasses import replace
from pathlib import Path

from hope_hf.cli.process import complain, is_first_process, memory_is_full, one_line

from .archive import archive, archive_folder
from .arguments import Arguments
from .checkpoints import as_checkpoint
from .documents import BadDocuments
from .numbers import numbers
from .parsing import names
from .report import as_json, as_markdown, summary
from .report_folder import Report
from .result import SuiteResult
from .subject import Subject, load_subject
from .suites import NEEDS_MEMORY, SUITES, WITHOUT_SUBJECT
from .tracking import Trackers


def evaluate(args: Arguments, trackers: Trackers) -> int:
    """Load the model, run the suites of `--suite` and write the report after each.

    Returns 0, 1 if a suite could not run, or 2 if its documents do not fit. Raises ValueError for a folder that cannot
    be written, and a model that cannot be loaded.
    """
    kept = archive_folder(args.archive_dir, args.model_name_or_path) if args.archive_dir else None
    asked = names(args.suite)
    report = Report(args if is_first_process() else replace(args, output_dir=None), asked)
    try:
        if any(name not in WITHOUT_SUBJECT for name in asked):
            report.subject = load_subject(args)
        status = _run_suites(args, asked, report)
        if report.results and is_first_process():
            status = max(status, _finish(args, report, trackers, kept))
    finally:
        report.close()
    return status


def _finish(args: Arguments, report: Report, trackers: Trackers, kept: Path | None) -> int:
    print(summary(report.results), flush=True)
    try:
        if kept:
            print(f"Archived: {archive(as_json(report.record), kept)}")
        if report.folder:
            print(f"Report: {report.write()}")
            checkpoint = as_checkpoint(args.model_name_or_path or "")
            trackers.log(numbers(report.record["results"]), report.pictures, checkpoint)
    except ValueError as error:
        return complain(error, 1)
    return 0


def _run_suites(args: Arguments, asked: list[str], report: Report) -> int:
    """Run the suites that the report has not yet, and add what they find; returns the exit status."""
    status = 0
    for index, name in enumerate(asked, 1):
        if name in report.results:
            continue
        if is_first_process():
            print(f"Suite {index} of {len(asked)}: {name} ...", flush=True)
        try:
            result = _run(name, args, report.subject)
        # Whatever fails in a suite or a library, the other suites are worth running.
        except Exception as error:
            report.failed[name] = _sentence(name, error)
            complain(report.failed[name], 1)
            status = max(status, 2 if isinstance(error, BadDocuments) else 1)
            continue
        if is_first_process():
            print(f"\n{as_markdown(name, result)}", flush=True)
        report.add(name, result)
    return status


def _run(name: str, args: Arguments, subject: Subject | None) -> SuiteResult:
    if name in NEEDS_MEMORY and not subject.has_memory:
        raise ValueError(
            f"--suite {name} looks into self-modifying memories, and {args.model_name_or_path} "
            f"({subject.model.config.model_type}) has none: leave it out."
        )
    return SUITES[name](args, subject)


def _sentence(name: str, error: Exception) -> str:
    if memory_is_full(error):
        reason = str(error).splitlines()[0] if str(error) else "MemoryError"
        return f"--suite {name}: the memory does not hold it, lower --batch_size or --lengths ({reason})."
    if isinstance(error, ValueError):
        return one_line(error)
    place = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{Path(place.filename).name}, line {place.lineno}"
    return f"--suite {name} failed: {type(error).__name__}: {one_line(error)} ({where})."
