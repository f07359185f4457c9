"""`--archive_dir`: every report is kept under its run and time, and none is overwritten."""

from datetime import UTC, datetime
from itertools import count
from pathlib import Path

from hope_hf.cli.flags import check_output

from .saved_reports import run_name


def archive_folder(archive_dir: str, model: str | None) -> Path:
    """`<archive_dir>/<run>`. Raises ValueError where it cannot be written."""
    folder = Path(archive_dir) / run_name(model or "synthetic")
    check_output(str(folder), "--archive_dir")
    return folder


def archive(text: str, folder: Path) -> Path:
    """Write a report's text to `<UTC time>.json` in the folder, or `-2.json` ... where there is one already."""
    time = f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for number in count(1):
            path = folder / (f"{time}.json" if number == 1 else f"{time}-{number}.json")
            try:
                with path.open("x", encoding="utf-8") as file:
                    file.write(text)
                return path
            except FileExistsError:
                continue
    except OSError as error:
        raise ValueError(f"--archive_dir {folder} cannot be written: {error.strerror}.") from None
