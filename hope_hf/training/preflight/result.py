"""What a check finds, on one process and over all of them."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Literal

from accelerate import Accelerator
from accelerate.utils import gather_object

LEVELS = ("ok", "warn", "fail")


@dataclass(frozen=True)
class Result:
    """What one process finds.

    Attributes:
        text: the reason, and after a colon or semicolon the mend.
        strain: which of several equal levels is the worst: the largest.
    """

    level: Literal["ok", "warn", "fail"]
    text: str
    strain: float = 0.0


def worst(results: list[Result]) -> Result:
    """The worst over all processes, in order of their ranks; it names its rank where the processes differ."""
    rank = max(range(len(results)), key=lambda rank: (LEVELS.index(results[rank].level), results[rank].strain))
    found = results[rank]
    if all(result.text == found.text for result in results):
        return found
    return Result(found.level, f"{found.text} (rank {rank})", found.strain)


class Report:
    """Prints one line per check on rank 0; all processes add each result, and know them all."""

    def __init__(self, accelerator: Accelerator, say: Callable[[str], None]):
        self._accelerator, self._say = accelerator, say
        self.levels: dict[str, str] = {}

    def add(self, name: str, own: Result) -> None:
        """The result of this process."""
        found = worst([Result(**result) for result in gather_object([asdict(own)])])
        self.levels[name] = found.level
        self._say(line(name, found))

    @property
    def status(self) -> int:
        """1 if a check failed."""
        return int("fail" in self.levels.values())

    def summary(self, output_dir: str) -> str:
        """The last line."""
        counts = ", ".join(f"{list(self.levels.values()).count(level)} {level}" for level in LEVELS)
        return f"Dry run: {counts}; nothing was written to {output_dir}."


def line(name: str, result: Result) -> str:
    """A check's line on the console."""
    return f"{result.level:<4}  {name:<9}  {result.text}"
