"""What `nvidia-smi` says of the machine's GPUs."""

import csv
import subprocess
from dataclasses import dataclass

FIELDS = "index,uuid,name,utilization.gpu,memory.used,memory.total,temperature.gpu"
SECONDS = 20
"""A driver in trouble answers slowly, or never."""


@dataclass(frozen=True)
class Gpu:
    """One GPU; None for what it does not report, as parts of a GPU do.

    Attributes:
        busy: percent of the last second.
        used, total: MiB.
        temperature: degrees Celsius.
    """

    index: str
    uuid: str
    name: str
    busy: int | None
    used: int | None
    total: int | None
    temperature: int | None


def ask_gpus() -> list[Gpu] | str:
    """All GPUs of the machine, or why they are not known."""
    command = ["nvidia-smi", f"--query-gpu={FIELDS}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=True)
    except FileNotFoundError:
        return "there is no nvidia-smi"
    except subprocess.TimeoutExpired:
        return f"nvidia-smi did not answer within {SECONDS} s"
    except (OSError, subprocess.CalledProcessError) as error:
        said = [line for text in (getattr(error, "stderr", ""), str(error)) for line in (text or "").splitlines()]
        return f"nvidia-smi failed ({said[0].rstrip('.')})"
    rows = [[cell.strip() for cell in row] for row in csv.reader(answer.stdout.splitlines()) if row]
    if any(len(row) != len(FIELDS.split(",")) for row in rows):
        return f"nvidia-smi gave an answer of another form ({answer.stdout.splitlines()[0][:80]})"
    return [Gpu(*row[:3], *map(_number, row[3:])) for row in rows]


def _number(cell: str) -> int | None:
    return int(cell) if cell.isdecimal() else None
