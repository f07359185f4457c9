"""What is wrong with the flags of an evaluation and the files that they name, found before torch is imported.

Otherwise it would be found hours later, after the suites in front of the one that reads the flag.
"""

import glob
import os
from importlib.util import find_spec

from hope_hf.common.flags import require_local
from hope_hf.data import require_texts

from .flags import Arguments, chosen_tasks, names
from .saved_reports import find_report, read_report
from .suites import SUITES, with_own_tasks


def check_places(args: Arguments) -> None:
    """ValueError for a suite that cannot run so, and for a file or folder that does not exist."""
    if args.compare:
        for report in args.compare:
            read_report(find_report(report, "--compare"), "--compare")
        return
    suites = names(args.suite)
    for name in suites:
        if not args.model_name_or_path:
            raise ValueError(f"--suite {name} needs a model: name it with --model_name_or_path.")
        if SUITES[name].package and find_spec(SUITES[name].package) is None:
            raise ValueError(f"--suite {name} needs {SUITES[name].package}: pip install 'hope_hf[eval]'.")
    if any("validation_file" in SUITES[name].reads for name in suites):
        require_texts(args)
    alone = [name for name in suites if not SUITES[name].in_processes]
    if in_processes() and alone:
        raise ValueError(f"--suite {alone[0]} runs in one process: start it with hope-hf eval.")
    for name in suites:
        if args.tasks is not None and SUITES[name].tasks:
            chosen_tasks(with_own_tasks(args, name), name, SUITES[name].tasks)
    # A pattern names checkpoints.
    if not glob.has_magic(args.model_name_or_path):
        require_local(args.model_name_or_path, "--model_name_or_path")
    if args.tokenizer_name:
        require_local(args.tokenizer_name, "--tokenizer_name")


def in_processes() -> bool:
    """Whether a launcher has started several processes."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1
