"""`hope-hf`: its help without torch, every command's own help, and one sentence for a wrong name."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import hope_hf
from hope_hf_main import COMMANDS, main

ROOT = Path(__file__).parents[2]


@pytest.mark.processes
def test_the_help_loads_no_library_and_takes_less_than_a_second():
    code = f"""
import resource, sys
sys.path.insert(0, {str(ROOT)!r})
from hope_hf_main import main
main(["--help"])
print(sorted({{"torch", "transformers", "hope_hf"}} & sys.modules.keys()))
used = resource.getrusage(resource.RUSAGE_SELF)
print(used.ru_utime + used.ru_stime)
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    *shown, loaded, seconds = ended.stdout.splitlines()
    assert shown[0] == "usage: hope-hf COMMAND ..." and loaded == "[]" and float(seconds) < 1
    assert [found[1] for line in shown if (found := re.match(r"  ([\w-]+) {2,}\w", line))] == list(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_answers_help_with_its_name(name, capsys):
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: hope-hf {name} ")


@pytest.mark.parametrize("name", COMMANDS)
def test_a_flag_that_does_not_exist_is_one_sentence(name, capsys):
    assert main([name, "--nothing_like_it"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1


def test_a_wrong_command_is_one_sentence(capsys):
    assert main(["trian"]) == main(["--verbose"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "error: hope-hf has no command 'trian'; did you mean train? hope-hf --help lists them.",
        "error: hope-hf has no command '--verbose': hope-hf --help lists them.",
    ]


def test_without_a_command_the_help_is_printed(capsys):
    assert main([]) == 0 and "example: hope-hf train" in capsys.readouterr().out
    assert main(["--version"]) == 0 and capsys.readouterr().out == f"{hope_hf.__version__}\n"


@pytest.mark.processes
@pytest.mark.usefixtures("warm_python")
def test_it_runs_as_a_module():
    ended = subprocess.run([sys.executable, "-m", "hope_hf", "plan", "--mfu", "2"], capture_output=True, text=True)
    assert ended.returncode == 2 and ended.stderr.startswith("error: ") and "--mfu" in ended.stderr
