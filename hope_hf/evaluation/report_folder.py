"""The folder of a report: written again when a suite has ended, so that a killed evaluation loses one suite alone."""

import json
import time
from datetime import UTC, datetime
from itertools import count
from pathlib import Path

from hope_hf.cli.files import replace_text
from hope_hf.cli.flags import check_output
from hope_hf.cli.folder_lock import FolderLock
from hope_hf.cli.process import complain
from hope_hf.cli.results import RESULTS_FILE, can_draw, draw_or_warn

from .arguments import Arguments
from .compare import different_flags
from .report import as_json, as_page, from_record, make_record, weights_time
from .result import SuiteResult
from .saved_reports import read_report
from .subject import Subject


class Report:
    """What an evaluation has found so far, and its files if there is `--output_dir`.

    Raises ValueError where the folder cannot be written. Of an unfinished report of the same evaluation in the
    folder the results are taken over; beside any other one, the files go to a folder of their own, named by the time.
    """

    def __init__(self, args: Arguments, asked: list[str]):
        self._args, self._asked = args, asked
        self.subject: Subject | None = None
        self._start, self._before = time.perf_counter(), 0.0
        self.results: dict[str, SuiteResult] = {}
        self.failed: dict[str, str] = {}
        self._drawn: dict[str, list[str]] = {}
        self.folder: Path | None = None
        self._lock: FolderLock | None = None
        if args.output_dir:
            self._open(Path(args.output_dir))

    def _open(self, folder: Path):
        check_output(str(folder), "--output_dir")
        before = unfinished_report(self._args, folder)
        folder = folder if before else free_folder(str(folder), RESULTS_FILE)
        lock = FolderLock(folder)
        try:
            lock.acquire()
        except ValueError:
            if folder != Path(self._args.output_dir) or not folder.is_dir():
                raise
            # Another evaluation is writing there.
            before, folder = None, _by_time(folder)
            lock = FolderLock(folder)
            lock.acquire()
        self._lock, self.folder = lock, folder
        if before:
            self.results, self._before = from_record(before), before["seconds"]
            self._drawn = {name: [file for file in before["pictures"].get(name, ())] for name in self.results}
            print(f"{folder / RESULTS_FILE} is unfinished: {', '.join(self.results)} are taken from it.", flush=True)

    @property
    def record(self) -> dict:
        """What results.json holds now."""
        unfinished = [name for name in self._asked if name not in self.results and name not in self.failed]
        seconds = self._before + time.perf_counter() - self._start
        record = make_record(self._args, self.subject, self.results, self.failed, seconds, unfinished)
        return record | {"pictures": self._drawn}

    @property
    def pictures(self) -> list[Path]:
        """The pictures that were drawn."""
        return [self.folder / file for files in self._drawn.values() for file in files]

    def add(self, name: str, result: SuiteResult):
        """Take a suite's result, and write the report with it."""
        self.results[name] = result
        if self.folder is None:
            return
        try:
            # The numbers first: a picture may take long or fail.
            self.write()
            for file, rows in result.logs.items():
                # lm-eval's documents hold values of any type.
                lines = (json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows)
                replace_text(self.folder / f"{file}.jsonl", "".join(lines))
        except (ValueError, OSError) as error:
            complain(f"--output_dir {self.folder} cannot be written: {error}.", 1)
        if result.pictures and can_draw():
            drawn = [file for file, draw in result.pictures.items() if draw_or_warn(draw, self.folder / file)]
            self._drawn[name] = drawn

    def write(self) -> Path:
        """Write results.md and results.json; returns the path of the latter. Raises ValueError where they cannot."""
        try:
            record = self.record
            self.folder.mkdir(parents=True, exist_ok=True)
            replace_text(self.folder / "results.md", as_page(record, self.results, self._drawn))
            replace_text(self.folder / RESULTS_FILE, as_json(record))
        except OSError as error:
            raise ValueError(f"--output_dir {self.folder} cannot be written: {error.strerror}.") from None
        return self.folder / RESULTS_FILE

    def close(self):
        """Let other evaluations write to the folder."""
        if self._lock:
            self._lock.release()


def unfinished_report(args: Arguments, folder: Path) -> dict | None:
    """The record of an evaluation that ended early in this folder, with the same flags and weights; else None."""
    try:
        record = read_report(folder / RESULTS_FILE, "--output_dir")
    except ValueError:
        return None
    name = args.model_name_or_path
    same_model = record["config"].get("model_name_or_path") == name
    if record["model"] is not None:
        same_model = same_model and name is not None and record["model"].get("weights_time") == weights_time(name)
    same_flags = not different_flags(vars(args), record["config"])
    return record if record["unfinished"] and same_model and same_flags else None


def free_folder(output_dir: str, file: str) -> Path:
    """`output_dir`, or a new folder in it if it holds `file` already. Raises ValueError if it cannot be written."""
    check_output(output_dir, "--output_dir")
    folder = Path(output_dir)
    return _by_time(folder) if (folder / file).exists() else folder


def _by_time(folder: Path) -> Path:
    """A new folder in this one, named by the time. Raises ValueError where it cannot be made."""
    try:
        for number in count(1):
            path = folder / (f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}" + (f"-{number}" if number > 1 else ""))
            try:
                path.mkdir()
                print(f"--output_dir {folder} holds a report already: this one goes to {path}.", flush=True)
                return path
            except FileExistsError:
                continue
    except OSError as error:
        raise ValueError(f"--output_dir {folder} cannot be written: {error.strerror}.") from None
