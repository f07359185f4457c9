"""Entry of the command line: runs the suites one after another, with one sentence for each failure."""

import time

from hope_hf.cli.process import complain, is_first_process, memory_is_full, set_up_cpu, warn_in_sentences

from .parsing import names, parse


def main(argv: list[str]) -> int:
    """Parse `argv`, run the suites, report. Returns 0, 1 if a suite could not run, 2 after a mistake in the flags.

    A ValueError is one sentence for the user; any other exception is a bug or machine failure and keeps its traceback.
    """
    warn_in_sentences()
    try:
        # Not at the top: it imports models and data sets.
        from .suites import IN_PROCESSES, NEEDS_MEMORY, SUITES, WITHOUT_SUBJECT

        args = parse(argv, SUITES)
        from .display import hide_foreign_bars, show_progress
        from .offline import leave_the_hub
        from .processes import are_several, join_processes
        from .report import as_markdown, check_folder, write_report
        from .subject import load_subject

        if args.offline:
            leave_the_hub()
        check_folder(args.output_dir)
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
        subject = load_subject(args) if wanting else None
    except ValueError as error:
        return complain(error, 2)
    start, results, failed = time.perf_counter(), {}, {}
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
    if args.output_dir and results and is_first_process():
        try:
            print(f"Report: {write_report(args, subject, results, failed, time.perf_counter() - start)}")
        except ValueError as error:
            return complain(error, 1)
    return 1 if failed else 0
