"""What surrounds every program: Ctrl-C is one sentence, and a reader that is gone stops nothing."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hope_hf.cli.program import Outliving, program
from hope_hf.interrupt import _is_ours, while_importing

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("command", [["run_clm.py"], ["run_eval.py"], ["-m", "hope_hf.plan"]], ids=lambda c: c[-1])
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
    assert _is_ours(["-m"], ["python", "-m", "hope_hf.plan", "-m"])
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


def test_output_goes_on_without_a_reader():
    reader, writer = os.pipe()
    with open(writer, "w", encoding="utf-8") as pipe:
        stream = Outliving(pipe)
        print("read", file=stream, flush=True)
        assert os.read(reader, 100) == b"read\n"
        os.close(reader)
        print("lost", file=stream, flush=True)
        print("lost" * 100_000, file=stream, flush=True)
        # So do libraries and child processes.
        assert os.write(stream.fileno(), b"lost") == 4


def test_other_errors_of_the_output_are_told():
    class Full:
        def write(self, text):
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        Outliving(Full()).write("a")
