"""The command line's entry: errors of the user become one sentence and an exit status."""

import errno

from hope_hf.common.files import PROCESSES
from hope_hf.common.process import first_line, launched_rank, print_error, sigterm_on_launcher_exit
from hope_hf.common.program import importing, program
from hope_hf.interrupt import STATUS

from .parsing import parse
from .places import check_places

DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


@program
def main(argv: list[str]) -> int:
    """Parse `argv` and train. Returns 0, or 2 after a mistake of the user, or 1 if training diverged, a check of
    `--dry_run` failed or another process is gone, or 130 after Ctrl-C outside of the steps or twice.
    """
    sigterm_on_launcher_exit()
    args = parse(argv)
    check_places(args)
    # Not at the top: flags are read and files are looked for without torch, which takes seconds to be imported.
    with importing():
        from hope_hf.common.devices import memory_is_full

        from .engines.guard import OneSidedError, gone, lost_process
        from .process import QUIT
        from .trainer import TrainingDiverged

        if args.dry_run:
            from .preflight.run import dry_run as run
        else:
            from .trainer import train as run

    try:
        return run(args)
    except KeyboardInterrupt:
        if args.dry_run:
            raise
        return print_error(QUIT, STATUS)
    except TrainingDiverged as error:
        return print_error(error, 1)
    except (RuntimeError, MemoryError) as error:
        if memory_is_full(error):
            return print_error(
                "The memory does not hold the run: lower --per_device_train_batch_size, --block_size or the model's "
                "size, or give --gradient_checkpointing; "
                f"{PROCESSES}/ram_rank{launched_rank()}.jsonl in --output_dir shows what filled it "
                f"({first_line(error)}).",
                2,
                everywhere=True,
            )
        reason = lost_process(error)
        if reason is None:
            raise
        return print_error(gone(reason), 1, everywhere=True)
    except OSError as error:
        if error.errno not in DISK_ERRORS:
            raise
        return print_error(
            f"--output_dir {args.output_dir} cannot be written ({error.strerror}): free space there or make it "
            "writable, then repeat the command; checkpoints that are complete are intact.",
            2,
            everywhere=True,
        )
    except ValueError as error:
        return print_error(error, 2, everywhere=isinstance(error, OneSidedError))
