"""A report: results as tables on the terminal, as a record and as a page, and the folder that holds them.

The files are rewritten after every suite, so a killed evaluation loses only one suite.
"""

import json
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from itertools import chain, count
from pathlib import Path

from hope_hf.common.files import replace_text, write_errors
from hope_hf.common.flags import check_output
from hope_hf.common.folder_lock import FolderLock
from hope_hf.common.process import print_error
from hope_hf.common.results import (
    RESULTS_FILE,
    SCHEMA_VERSION,
    Row,
    architecture,
    can_draw,
    draw_or_warn,
    markdown_table,
    provenance,
)  # fmt: skip

from .checkpoints import as_checkpoint
from .compare import different_flags
from .display import titled
from .flags import Arguments
from .result import SuiteResult
from .saved_reports import read_report, run_name
from .subject import Subject

# The fields of a `SuiteResult` that a report holds.
RECORDED = ("tables", "samples", "text", "summary")


def as_markdown(name: str, result: SuiteResult) -> str:
    """One suite's section: its tables and text, as on the terminal."""
    parts = [f"## {name}"]
    for title, rows in result.tables.items():
        parts += [f"### {title}", markdown_table(rows)]
    if result.text:
        parts.append(f"```\n{result.text}\n```")
    return "\n\n".join(parts) + "\n"


def summary(results: dict[str, SuiteResult]) -> str:
    """The main numbers of all suites, as a section; empty if there are none."""
    rows: list[Row] = []
    for name, result in results.items():
        rows += [{"suite": name, **row} for row in result.summary]
    return f"## summary\n\n{markdown_table(rows)}\n" if rows else ""


def make_record(
    args: Arguments,
    subject: Subject | None,
    results: dict[str, SuiteResult],
    failed: dict[str, str],
    seconds: float,
    unfinished: Sequence[str] = (),
) -> dict:
    """The content of results.json; `unfinished`: the suites that have not ended yet."""
    recorded = {}
    for name, result in results.items():
        recorded[name] = {field: getattr(result, field) for field in RECORDED}
    return {
        "schema_version": SCHEMA_VERSION,
        "config": asdict(args),
        "model": _describe(args, subject),
        "seed": args.seed,
        "limit": args.limit,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": round(seconds, 1),
        **provenance(),
        "results": recorded,
        "failed": failed,
        "unfinished": list(unfinished),
    }


def as_json(record: dict) -> str:
    """The text of results.json."""
    return json.dumps(record, indent=2, allow_nan=False) + "\n"


def as_page(record: dict, results: dict[str, SuiteResult], pictures: dict[str, list[str]]) -> str:
    """The text of results.md; `pictures`: the files of each suite that were drawn."""
    model = record["model"] or {"name": record["config"]["model_name_or_path"], "parameters": 0}
    lines = [f"# Evaluation of {model['name']}", ""]
    if model["parameters"]:
        lines.append(f"- {model['type']}, {model['parameters']:,} parameters, {model['dtype']} on {model['device']}")
    lines.append(f"- {record['date']}, seed {record['seed']}, {record['seconds']} s")
    if record["limit"]:
        lines.append(f"- **limited to {record['limit']} samples: not for publication**")
    lines += [f"- `{' '.join(map(str, record['command']))}`", ""]
    for name, reason in record["failed"].items():
        lines.append(f"- **{name} could not run**: {reason}")
    for name in record["unfinished"]:
        lines.append(f"- **{name} has not ended yet**")
    sections = list(filter(None, [summary(results)]))
    for name, result in results.items():
        section = as_markdown(name, result)
        for file in pictures.get(name, ()):
            section += f"\n![{file}]({file})\n"
        sections.append(section)
    return "\n".join(lines) + "\n" + "\n".join(sections)


def weights_time(model: str) -> str | None:
    """When the weights in a model's folder were last written; None for a name on the Hub."""
    times = [file.stat().st_mtime for file in Path(model).glob("*.safetensors")]
    return datetime.fromtimestamp(max(times), UTC).isoformat() if times else None


def _describe(args: Arguments, subject: Subject | None) -> dict | None:
    if subject is None:
        return None
    model = subject.model
    checkpoint = as_checkpoint(args.model_name_or_path)
    return {
        "name": model.name_or_path,
        # Steps and tokens are known only for a checkpoint of a run.
        "step": checkpoint.step,
        "tokens": checkpoint.tokens,
        "weights_time": weights_time(args.model_name_or_path),
        "type": model.config.model_type,
        "parameters": model.num_parameters(),
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": str(model.device),
        # An infinite number, such as Mamba-2's longest time step, is not JSON: it is written as a string.
        "config": json.loads(json.dumps(model.config.to_dict()), parse_constant=str),
    }


class Report:
    """The results of an evaluation so far, and its files if there is `--output_dir`.

    The results of an unfinished report of the same evaluation in the folder are taken over. If the folder holds
    another report, the files go to a new folder in it, named by the time. Raises ValueError if it cannot be written.
    """

    def __init__(self, args: Arguments, suites: list[str]):
        self._args = args
        self._suites = suites
        self.subject: Subject | None = None
        self._start = time.perf_counter()
        self._seconds_before = 0.0
        self.results: dict[str, SuiteResult] = {}
        self.failed: dict[str, str] = {}
        self._drawn: dict[str, list[str]] = {}
        self.folder: Path | None = None
        self._lock: FolderLock | None = None
        if args.output_dir:
            self._open(Path(args.output_dir))

    def _open(self, folder: Path):
        check_output(str(folder), "--output_dir")
        unfinished = unfinished_report(self._args, folder)
        if not unfinished:
            folder = free_folder(str(folder), RESULTS_FILE)
        self._lock = FolderLock(folder)
        try:
            self._lock.acquire()
        except ValueError:
            if folder != Path(self._args.output_dir) or not folder.is_dir():
                raise
            # Another evaluation is writing there.
            unfinished = None
            folder = _by_time(folder)
            self._lock = FolderLock(folder)
            self._lock.acquire()
        self.folder = folder
        if unfinished:
            self._take_over(unfinished)

    def _take_over(self, record: dict):
        """Go on with an unfinished report."""
        for name, recorded in record["results"].items():
            fields = {field: recorded[field] for field in RECORDED}
            self.results[name] = SuiteResult(**fields)
            self._drawn[name] = list(record["pictures"].get(name, ()))
        self._seconds_before = record["seconds"]
        names = ", ".join(self.results)
        print(f"{self.folder / RESULTS_FILE} is unfinished: {names} are taken from it.", flush=True)

    @property
    def record(self) -> dict:
        """The present content of results.json."""
        ended = {*self.results, *self.failed}
        unfinished = [name for name in self._suites if name not in ended]
        seconds = self._seconds_before + time.perf_counter() - self._start
        record = make_record(self._args, self.subject, self.results, self.failed, seconds, unfinished)
        return record | {"pictures": self._drawn}

    @property
    def _model(self) -> str:
        """Architecture, and folder or name, for the title of pictures; empty where a suite loads several models."""
        if self.subject is None:
            return ""
        model = self.subject.model
        return f"{architecture(model.config.model_type)} {Path(model.name_or_path).name}".strip()

    @property
    def pictures(self) -> list[Path]:
        """The pictures that were drawn."""
        return [self.folder / file for file in chain.from_iterable(self._drawn.values())]

    def add(self, name: str, result: SuiteResult):
        """Add a suite's result and write the report."""
        self.results[name] = result
        if self.folder is None:
            return
        try:
            # The numbers first: a picture may take long or fail.
            self.write()
            with write_errors(f"--output_dir {self.folder}"):
                for file, rows in result.logs.items():
                    replace_text(self.folder / f"{file}.jsonl", _json_lines(rows))
        except ValueError as error:
            print_error(error, 1)
        if result.pictures and can_draw():
            self._drawn[name] = []
            with titled(self._model):
                for file, draw in result.pictures.items():
                    if draw_or_warn(draw, self.folder / file):
                        self._drawn[name].append(file)

    def write(self) -> Path:
        """Write results.md and results.json; returns the path of the latter. Raises ValueError if that fails."""
        with write_errors(f"--output_dir {self.folder}"):
            record = self.record
            self.folder.mkdir(parents=True, exist_ok=True)
            replace_text(self.folder / "results.md", as_page(record, self.results, self._drawn))
            replace_text(self.folder / RESULTS_FILE, as_json(record))
        return self.folder / RESULTS_FILE

    def close(self):
        """Let other evaluations write to the folder."""
        if self._lock:
            self._lock.release()


def _json_lines(rows: list[dict]) -> str:
    # lm-eval's documents hold values of any type.
    lines = [json.dumps(row, ensure_ascii=False, default=str) for row in rows]
    return "".join(f"{line}\n" for line in lines)


def unfinished_report(args: Arguments, folder: Path) -> dict | None:
    """The record of an evaluation in this folder without results of all its suites, with the same flags and weights.

    None if there is none.
    """
    try:
        record = read_report(folder / RESULTS_FILE, "--output_dir")
    except ValueError:
        return None
    name = args.model_name_or_path
    if not record["unfinished"] and not record["failed"]:
        return None
    if record["config"].get("model_name_or_path") != name or different_flags(vars(args), record["config"]):
        return None
    if record["model"] is not None and record["model"].get("weights_time") != weights_time(name):
        return None
    return record


def free_folder(output_dir: str, file: str) -> Path:
    """`output_dir`, or a new folder in it if it holds `file` already. Raises ValueError if it cannot be written."""
    check_output(output_dir, "--output_dir")
    folder = Path(output_dir)
    return _by_time(folder) if (folder / file).exists() else folder


def _by_time(folder: Path) -> Path:
    """A new folder in this one, named by the time. Raises ValueError if it cannot be made."""
    path = _make_by_time(folder, "", Path.mkdir, "--output_dir")
    print(f"--output_dir {folder} holds a report already: this one goes to {path}.", flush=True)
    return path


def _make_by_time(folder: Path, ending: str, make: Callable[[Path], object], flag: str) -> Path:
    """Make `<UTC time><ending>` in the folder, or `<UTC time>-2<ending>` ... if that exists; returns its path."""
    time = f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}"
    with write_errors(f"{flag} {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
        for number in count(1):
            path = folder / (time + (f"-{number}" if number > 1 else "") + ending)
            with suppress(FileExistsError):
                make(path)
                return path


def archive_folder(archive_dir: str, model: str) -> Path:
    """`<archive_dir>/<run>`. Raises ValueError if it cannot be written."""
    folder = Path(archive_dir) / run_name(model)
    check_output(str(folder), "--archive_dir")
    return folder


def archive(text: str, folder: Path) -> Path:
    """Write a report's text to `<UTC time>.json` in the folder; nothing is overwritten."""

    def write(path: Path):
        with path.open("x", encoding="utf-8") as file:
            file.write(text)

    return _make_by_time(folder, ".json", write, "--archive_dir")
