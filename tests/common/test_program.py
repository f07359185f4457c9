"""What surrounds every program: Ctrl-C is one sentence, a reader that is gone stops nothing, progress in log files."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import datasets
import pytest
from datasets import Dataset

from hope_hf.common import program as program_module
from hope_hf.common.program import DroppingStream, LogLines, lines_of_datasets, printed, program
from hope_hf.interrupt import _is_ours, while_importing

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "command", [["run_clm.py", "--output_dir", "x"], ["-m", "hope_hf", "plan"]], ids=["script", "module"]
)
def test_ctrl_c_while_a_program_imports_is_one_sentence(tmp_path, command):
    (tmp_path / "transformers.py").write_text(
        "import os, signal, time; os.kill(os.getpid(), signal.SIGINT); time.sleep(9)"
    )
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    ended = subprocess.run([sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (130, "\nerror: stopped by Ctrl-C.\n")


def test_a_program_that_only_imports_the_package_keeps_its_own_handler(tmp_path):
    assert signal.getsignal(signal.SIGINT) is not while_importing
    assert not _is_ours([str(tmp_path / "run_clm.py")], ["python", "run_clm.py"])
    assert not _is_ours(["-m"], ["python", "-m", "my_package.train"])
    assert not _is_ours([""], ["python"])
    assert _is_ours(["-m"], ["python", "-m", "hope_hf", "plan", "-m"])
    assert _is_ours([str(tmp_path / "bin/hope-hf")], ["python", "bin/hope-hf"])
    assert _is_ours([str(ROOT / "run_clm.py")], ["python", "run_clm.py"])


def test_ctrl_c_in_a_program_is_one_sentence(capsys):
    before = signal.signal(signal.SIGINT, while_importing)

    @program
    def main(argv: list[str]) -> int:
        signal.raise_signal(signal.SIGINT)

    try:
        assert main([]) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    assert capsys.readouterr().err == "error: stopped by Ctrl-C.\n"


def test_a_mistake_of_the_user_is_one_sentence(capsys):
    @program
    def main(argv: list[str]) -> int:
        raise {"flag": ValueError, "bug": TypeError}[argv[0]]("--seed is -1.")

    assert main(["flag"]) == 2
    assert capsys.readouterr().err == "error: --seed is -1.\n"
    with pytest.raises(TypeError):
        main(["bug"])


def test_output_goes_on_without_a_reader():
    reader, writer = os.pipe()
    with open(writer, "w", encoding="utf-8") as pipe:
        stream = DroppingStream(pipe)
        print("read", file=stream, flush=True)
        assert os.read(reader, 100) == b"read\n"
        os.close(reader)
        print("lost", file=stream, flush=True)
        print("lost" * 100_000, file=stream, flush=True)
        # So do libraries and child processes.
        assert os.write(stream.fileno(), b"lost") == 4


@pytest.fixture
def replaced(monkeypatch):
    """Puts a file in the place of standard output or error."""

    def replace(name: str, file):
        monkeypatch.setattr(sys, name, file)
        monkeypatch.setattr(sys, f"__{name}__", file)

    return replace


@program
def prints(argv: list[str]) -> int:
    """Three lines into the stream that is named first; the second word is its status."""
    for _ in range(3):
        print("lost", file=getattr(sys, argv[0]), flush=True)
    return printed(int(argv[1]))


@pytest.mark.parametrize(
    "full, name, status, expected",
    [("stdout", "standard output", 0, 1), ("stdout", "standard output", 2, 2), ("stderr", "standard error", 0, 0)],
)
def test_a_full_disk_under_the_output_stops_nothing_and_is_told_once(replaced, capsys, full, name, status, expected):
    # Every write to it fails as on a full disk.
    with open("/dev/full", "w", encoding="utf-8") as device:
        replaced(full, device)
        assert prints([full, str(status)]) == expected
        assert os.write(device.fileno(), b"lost") == 4
    said = "".join(capsys.readouterr())
    assert said.count(f"{name} cannot be written (No space left on device)") == 1
    # A result that could not be printed is no success.
    assert ("error: the result was not written" in said) == (full == "stdout")


def test_a_reader_that_has_seen_enough_makes_no_failure(replaced):
    """As in `hope-hf plan | head`."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w", encoding="utf-8") as pipe:
        replaced("stdout", pipe)
        assert prints(["stdout", "0"]) == 0


def test_of_lm_eval_only_bars_reach_a_log(monkeypatch, capsys):
    monkeypatch.setattr(program_module, "LOG_SECONDS", 0.0)
    lines = LogLines("%|")
    lines.write("some note\n")
    lines.write("\rRunning requests:  10%|#    | 4/40")
    assert capsys.readouterr().err == "Running requests:  10%|#    | 4/40\n"


@pytest.mark.parametrize("rank, processes, first", [("16", None, True), ("1", "2", False), ("0", "2", True)])
def test_a_rank_that_no_launcher_gave_hides_nothing(monkeypatch, capsys, rank, processes, first):
    """RANK may be that of a sweep over LoRAs; libraries read it, too."""
    launched = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes}
    for name, value in launched.items():
        monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)

    @program
    def main(argv: list[str]) -> int:
        raise ValueError("--seed is -1.")

    assert main([]) == 2
    assert ("--seed" in capsys.readouterr().err) == first
    assert ("LOCAL_RANK" in os.environ) == ("RANK" in os.environ) == (processes is not None)


@pytest.mark.parametrize("rank, seconds", [("0", 0.0), ("0", 1000.0), ("1", 0.0)])
def test_a_log_has_lines_of_a_bar_of_datasets_and_all_else(monkeypatch, capsys, rank, seconds):
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(program_module, "LOG_SECONDS", seconds)
    monkeypatch.setattr(datasets.tqdm, "mininterval", 0.0, raising=False)
    datasets.disable_progress_bars()

    def encode(rows):
        print("a warning", file=sys.stderr)
        return rows

    with lines_of_datasets("Tokenizing"):
        Dataset.from_dict({"text": ["a"] * 9}).map(encode, batched=True, batch_size=3, desc="Tokenizing")
    lines = capsys.readouterr().err.splitlines()
    assert lines.count("a warning") == 3
    bars = [line for line in lines if line.startswith("Tokenizing:")]
    assert len(lines) == 3 + len(bars) and any("9/9 [" in bar for bar in bars) == (rank == "0" and not seconds)
    assert datasets.are_progress_bars_disabled()
