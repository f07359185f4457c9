"""What one command does: it evaluates a model or the checkpoints of a run, or compares reports."""

import atexit
import os
import traceback
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import datasets
import torch
import torch.distributed as dist
import transformers

from hope_hf.common.devices import memory_is_full, set_up_cpu
from hope_hf.common.flags import check_output
from hope_hf.common.process import first_line, go_offline, is_first_process, one_line, print_error
from hope_hf.common.program import printed
from hope_hf.common.progress import show_progress
from hope_hf.data import find_files

from .checkpoints import Checkpoint, as_checkpoint, draw_history, find_checkpoints, is_done, report_folder
from .compare import FILE as COMPARISON
from .compare import as_page, compare, write_comparison
from .flags import Arguments, names
from .places import in_processes
from .report import Report, archive, archive_folder, as_json, as_markdown, free_folder, summary
from .result import CannotRun, SuiteResult, numbers
from .saved_reports import run_name
from .subject import Subject, load_subject
from .suites import SUITES, with_own_tasks
from .tracking import Sent, Trackers, sent_before


def begin(args: Arguments) -> int:
    """Run what the flags name; returns 0, or 1 if a suite could not run or a result is lost. Raises ValueError for
    mistakes in the flags.
    """
    status = _compare(args) if args.compare else _evaluate_all(args)
    # The reports in a folder are the work.
    return status if args.output_dir or not is_first_process() else printed(status)


def _evaluate_all(args: Arguments) -> int:
    _set_up(args)
    suites = names(args.suite)
    together = [name for name in suites if SUITES[name].over_checkpoints]
    if together and len(suites) > 1:
        raise ValueError(f"--suite {together[0]} reads all checkpoints at once: run it without the other suites.")
    checkpoints = [] if together else find_checkpoints(args)
    name = run_name(checkpoints[0].path if checkpoints else args.model_name_or_path)
    with Trackers(args.report_to, name, args.output_dir) as trackers:
        return _each(args, checkpoints, trackers) if checkpoints else evaluate(args, trackers)


def _set_up(args: Arguments):
    if args.offline:
        go_offline()
        # datasets has read the environment at import.
        datasets.config.HF_HUB_OFFLINE = True
    set_up_cpu(args.cpu_threads, warns=True)
    # transformers and datasets would draw their bars in log files, too.
    if not show_progress():
        datasets.disable_progress_bars()
        transformers.utils.logging.disable_progress_bar()
    # An empty file is found here and not hours later, after the suites in front of the one that reads it.
    if args.validation_file and any("validation_file" in SUITES[name].reads for name in names(args.suite)):
        find_files(args.validation_file, "--validation_file", "validation")
    if in_processes():
        _join_processes()


def _join_processes():
    """Connect to the processes that the launcher started; each has its own accelerator if there are several."""
    if torch.accelerator.is_available():
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]) % torch.accelerator.device_count())
    # The processes exchange answers only, so gloo works for every device. The slowest one may take any time.
    dist.init_process_group("gloo", timeout=timedelta(weeks=52))
    atexit.register(dist.destroy_process_group)


def _each(args: Arguments, checkpoints: list[Checkpoint], trackers: Trackers) -> int:
    """Evaluate the checkpoints that have no report in `--output_dir`, and draw the numbers of all reports there."""
    if not args.output_dir:
        raise ValueError("Several checkpoints need a folder for their reports: name it with --output_dir.")
    check_output(args.output_dir, "--output_dir")
    todo = [checkpoint for checkpoint in checkpoints if not is_done(args, checkpoint)]
    _say(f"{len(checkpoints)} checkpoints, {len(todo)} of them without a report.")
    trackers.before = sent_before(args.output_dir, todo)
    status = 0
    for checkpoint in todo:
        _say(f"\n# {checkpoint.path}")
        folder = str(report_folder(args, checkpoint))
        args_of_checkpoint = replace(args, model_name_or_path=checkpoint.path, output_dir=folder)
        try:
            status = max(status, evaluate(args_of_checkpoint, trackers))
        # The checkpoint is broken, or the run has deleted it: the others are evaluated.
        except ValueError as error:
            status = print_error(error, 1)
    if is_first_process():
        for picture in draw_history(args.output_dir):
            print(f"Over all checkpoints: {picture}")
    return status


def _compare(args: Arguments) -> int:
    if args.output_dir:
        check_output(args.output_dir, "--output_dir")
    result = compare(args)
    print(as_page(result), flush=True)
    if args.output_dir:
        folder = free_folder(args.output_dir, COMPARISON)
        print(f"Comparison: {write_comparison(args, result, folder)}")
    return 0


def _say(text: str):
    if is_first_process():
        print(text, flush=True)


def evaluate(args: Arguments, trackers: Trackers) -> int:
    """Load the model, run the suites of `--suite` and write the report after each.

    Returns 0, 1 if a suite could not run, or 2 after a mistake in its flags, files or documents. Raises ValueError for
    a folder that cannot be written, and a model that cannot be loaded.
    """
    archive_to = archive_folder(args.archive_dir, args.model_name_or_path) if args.archive_dir else None
    suites = names(args.suite)
    report = Report(args if is_first_process() else replace(args, output_dir=None), suites)
    try:
        if not all(SUITES[name].over_checkpoints for name in suites):
            report.subject = load_subject(args)
        status = _run_suites(args, suites, report)
        if report.results and is_first_process():
            status = max(status, _finish(args, report, trackers, archive_to))
    finally:
        report.close()
    return status


def _finish(args: Arguments, report: Report, trackers: Trackers, archive_to: Path | None) -> int:
    print(summary(report.results), flush=True)
    try:
        if archive_to:
            print(f"Archived: {archive(as_json(report.record), archive_to)}")
        if report.folder:
            print(f"Report: {report.write()}")
            checkpoint = as_checkpoint(args.model_name_or_path)
            trackers.log(Sent(numbers(report.record["results"]), report.pictures, checkpoint))
    except ValueError as error:
        return print_error(error, 1)
    return 0


def _run_suites(args: Arguments, suites: list[str], report: Report) -> int:
    """Run the suites that are missing in the report, and add their results to it; returns the exit status."""
    status = 0
    for index, name in enumerate(suites, 1):
        if name in report.results:
            continue
        _say(f"Suite {index} of {len(suites)}: {name} ...")
        try:
            result = _run(name, args, report.subject)
        # Any exception of a suite or a library is caught, so that the other suites still run.
        except Exception as error:
            report.failed[name] = _sentence(name, error)
            print_error(report.failed[name], 1)
            is_mistake = isinstance(error, ValueError) and not isinstance(error, CannotRun)
            status = max(status, 2 if is_mistake else 1)
            continue
        _say(f"\n{as_markdown(name, result)}")
        report.add(name, result)
    return status


def _run(name: str, args: Arguments, subject: Subject | None) -> SuiteResult:
    if SUITES[name].needs_memory and not subject.has_memory:
        raise CannotRun(
            f"--suite {name} measures self-modifying memories, and {args.model_name_or_path} "
            f"({subject.model.config.model_type}) has none: leave it out."
        )
    return SUITES[name](with_own_tasks(args, name), subject)


def _sentence(name: str, error: Exception) -> str:
    if memory_is_full(error):
        return f"--suite {name}: out of memory, lower --batch_size or --lengths ({first_line(error)})."
    if isinstance(error, ValueError):
        return one_line(error)
    place = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{Path(place.filename).name}, line {place.lineno}"
    return f"--suite {name} failed: {type(error).__name__}: {one_line(error)} ({where})."
