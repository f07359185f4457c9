"""What one command evaluates: a model, the checkpoints of a run, or nothing but reports that are compared."""

from dataclasses import asdict, replace

from hope_hf.cli.flags import check_output
from hope_hf.cli.process import complain, is_first_process, set_up_cpu

from .arguments import Arguments
from .checkpoints import Checkpoint, find_checkpoints
from .compare import FILE as COMPARISON
from .compare import as_page, compare, write_comparison
from .display import hide_foreign_bars, show_progress
from .evaluate import evaluate
from .history import draw_history, is_done, report_folder
from .offline import leave_the_hub
from .parsing import names
from .processes import are_several, join_processes
from .report_folder import free_folder
from .saved_reports import run_name
from .suites import IN_PROCESSES, OVER_CHECKPOINTS, WITHOUT_SUBJECT
from .tracking import Trackers


def begin(args: Arguments) -> int:
    """Do what the flags ask for; returns 0, or 1 if a suite could not run. Raises ValueError for mistakes in them."""
    if args.compare:
        return _compare(args)
    _set_up(args)
    together = OVER_CHECKPOINTS & set(names(args.suite))
    if together and len(names(args.suite)) > 1:
        raise ValueError(f"--suite {min(together)} reads all checkpoints at once: run it without the other suites.")
    checkpoints = [] if together else find_checkpoints(args)
    name = run_name(checkpoints[0].path if checkpoints else args.model_name_or_path or "synthetic")
    with Trackers(args.report_to, name, args.output_dir) as trackers:
        return _each(args, checkpoints, trackers) if checkpoints else evaluate(args, trackers)


def _set_up(args: Arguments):
    if args.offline:
        leave_the_hub()
    set_up_cpu(args.cpu_threads)
    if not show_progress():
        hide_foreign_bars()
    asked = names(args.suite)
    wanting = [name for name in asked if name not in WITHOUT_SUBJECT]
    if wanting and not args.model_name_or_path:
        raise ValueError(f"--suite {wanting[0]} needs a model: name it with --model_name_or_path.")
    if are_several():
        alone = [name for name in asked if name not in IN_PROCESSES]
        if alone:
            raise ValueError(f"--suite {alone[0]} runs in one process: start it with python run_eval.py.")
        join_processes()


def _each(args: Arguments, checkpoints: list[Checkpoint], trackers: Trackers) -> int:
    """Evaluate those without a report in `--output_dir`, and draw all that are there."""
    if set(names(args.suite)) <= WITHOUT_SUBJECT:
        raise ValueError(f"--suite {args.suite} trains its own models: leave --checkpoints out.")
    if not args.output_dir:
        raise ValueError("Several checkpoints need a folder for their reports: name it with --output_dir.")
    check_output(args.output_dir, "--output_dir")
    todo = [checkpoint for checkpoint in checkpoints if not is_done(args, checkpoint, asdict(args))]
    _say(f"{len(checkpoints)} checkpoints, {len(todo)} of them without a report.")
    status = 0
    for checkpoint in todo:
        _say(f"\n# {checkpoint.path}")
        own = replace(args, model_name_or_path=checkpoint.path, output_dir=str(report_folder(args, checkpoint)))
        try:
            status = max(status, evaluate(own, trackers))
        # Broken, or deleted by the run in the meantime: the others are evaluated.
        except ValueError as error:
            status = complain(error, 1)
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
