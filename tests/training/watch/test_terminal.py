"""What a user sees on a terminal: one progress bar that stays in its place, and whole lines above it."""

import io
import re
from contextlib import redirect_stderr, redirect_stdout

import pytest
import transformers
from training_runs import change_losses, no_number, read_rows

from hope_hf.training import trainer

BAR = re.compile(r"( *\d+)%\|.*\| \d+/8 \[.*\]")


class Terminal(io.StringIO):
    """Standard output and error of an interactive terminal."""

    def isatty(self) -> bool:
        return True

    def screen(self) -> list[str]:
        """The final lines, after all cursor movements."""
        lines, row, column = [""], 0, 0
        for piece in re.findall(r"\x1b\[A|[\r\n]|[^\r\n\x1b]+", self.getvalue()):
            if piece == "\x1b[A":
                row = max(0, row - 1)
            elif piece == "\r":
                column = 0
            elif piece == "\n":
                row, column = row + 1, 0
                lines += [""] * (row + 1 - len(lines))
            else:
                before = lines[row].ljust(column)
                lines[row] = before[:column] + piece + before[column + len(piece) :]
                column += len(piece)
        return [line.rstrip() for line in lines]


@pytest.fixture
def watch(run):
    """Run on a terminal; returns the exit status and the lines that are not empty."""

    def start(*arguments):
        terminal = Terminal()
        transformers.utils.logging.enable_progress_bar()
        with redirect_stdout(terminal), redirect_stderr(terminal):
            status, _ = run(*arguments)
        return status, [line for line in terminal.screen() if line]

    yield start
    transformers.utils.logging.disable_progress_bar()


def test_one_bar_below_whole_lines(watch, tmp_path):
    status, lines = watch("a", "--eval_steps", "4", "--checkpointing_steps", "3", "--logging_steps", "2")
    assert status == 0
    first = [line.startswith("step 1/8") for line in lines].index(True)
    last = [line.startswith("Loss ") for line in lines].index(True)
    run_lines = lines[first:last]
    assert all(re.fullmatch(r"step \d/8 \| (loss .* eta \d:\d\d:\d\d|eval.*)", line) for line in run_lines[:-1])
    evaluations = [line for line in run_lines if "| evaluating " in line]
    assert [line[:8] for line in evaluations] == ["step 4/8", "step 8/8"]
    assert len(run_lines) == len(read_rows(tmp_path / "a")) + len(evaluations) + 1
    assert BAR.fullmatch(run_lines[-1])[1] == "100"
    assert sum("/8 [" in line for line in lines) == 1
    assert not any("%|" in line for line in lines[last:])


def test_an_error_begins_a_line_of_its_own(watch, monkeypatch):
    change_losses(monkeypatch, no_number(2, 3, 4))
    monkeypatch.setattr(trainer, "MOST_SKIPS_IN_A_ROW", 3)
    status, lines = watch("a")
    *_, before, error = lines
    assert status == 1 and error.startswith("error: ")
    assert BAR.fullmatch(before)
