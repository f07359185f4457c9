"""`--checkpoint_hook`: a command beside the training, which it neither delays nor fails."""

import json
import os
import shlex
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
from checkpoint_run import MARK, Run, names

from hope_hf.training.checkpoints.hook import LOG_FILE, CheckpointHook
from hope_hf.training.checkpoints.writer import CheckpointWriter

LAUNCHED = {
    "RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0", "ROLE_NAME": "x",
    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "ACCELERATE_USE_FSDP": "true", "TORCHELASTIC_RUN_ID": "x",
    "ACCELERATE_MIXED_PRECISION": "no", "FSDP_VERSION": "2", "OMPI_COMM_WORLD_RANK": "1",
}  # fmt: skip
STEPS = r'echo "$HOPE_STEP" >> "$HOPE_OUTPUT_DIR/steps"'


def make(command: str | None, folder: Path) -> tuple[CheckpointHook, list[str]]:
    said = []
    return CheckpointHook(command, folder, said.append), said


def checkpoint(folder: Path, step: int) -> Path:
    path = folder / f"checkpoint-{step}"
    path.mkdir()
    return path


def until(happens, seconds: float = 30.0):
    end = time.monotonic() + seconds
    while not happens():
        assert time.monotonic() < end
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    """Whether a process runs: nobody may have asked for the status of one that has ended."""
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def test_it_is_told_of_the_checkpoint_and_not_of_the_launcher(tmp_path, monkeypatch):
    for name, value in LAUNCHED.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("RANKING", "kept")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    print_all = f'{sys.executable} -c \'import json, os; json.dump(dict(os.environ), open("seen.json", "w"))\''
    hook, said = make(print_all, Path("run"))
    hook.start(checkpoint(Path("run"), 7), 7)
    hook.wait()
    seen = json.loads((tmp_path / "seen.json").read_text())
    assert not LAUNCHED.keys() & seen.keys() and seen["RANKING"] == "kept"
    assert seen["PATH"] == os.environ["PATH"]
    assert seen["HOPE_CHECKPOINT"] == str(tmp_path / "run" / "checkpoint-7") and seen["HOPE_STEP"] == "7"
    assert seen["HOPE_OUTPUT_DIR"] == str(tmp_path / "run")
    assert len(said) == 1 and said[0].startswith("Waiting for --checkpoint_hook of checkpoint-7")


@pytest.mark.parametrize("trap", ["", "trap '' TERM; "])
def test_a_signal_ends_the_waiting_and_the_hook(tmp_path, trap):
    hook, said = make(f"{trap}sleep 60 & echo $! > {tmp_path}/pid; wait", tmp_path)
    for step in (1, 2):
        hook.start(checkpoint(tmp_path, step), step)
    until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
    before = signal.getsignal(signal.SIGTERM)
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
    start = time.monotonic()
    hook.wait()
    assert time.monotonic() - start < 20
    assert "SIGTERM ends the waiting" in said[0] and "checkpoint-1, checkpoint-2 was ended or not run" in said[1]
    until(lambda: not is_alive(int((tmp_path / "pid").read_text())))
    assert signal.getsignal(signal.SIGTERM) == before
    # The second one was not begun.
    assert "step 2" not in (tmp_path / LOG_FILE).read_text() and len(said) == 2


@pytest.mark.usefixtures("one_cpu_process")
def test_a_checkpoint_in_use_is_deleted_later(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    gate = tmp_path / "gate"
    waits = f'while [ ! -e {gate} ]; do sleep 0.02; done; ls "$HOPE_CHECKPOINT"/manifest.json; {STEPS}'
    hook, said = make(waits, folder)
    run, writer = Run(), CheckpointWriter(folder, save_total_limit=1, hook=hook, mark=MARK)
    for _ in range(3):
        run.train(1)
        run.save_with(writer, background=True)
    writer.finish()
    writer.finish()
    assert names(folder) == ["checkpoint-1", "checkpoint-2", "checkpoint-3", LOG_FILE]
    gate.touch()
    writer.close()
    assert names(folder) == ["checkpoint-3", LOG_FILE, "steps"]
    assert (folder / "steps").read_text().split() == ["1", "2", "3"]
    assert "No such file" not in (folder / LOG_FILE).read_text() and len(said) == 1


def test_hooks_run_one_after_the_other_and_nobody_waits_for_them(tmp_path):
    command = 'echo "begin $HOPE_STEP" >> order; sleep 0.3; echo "end $HOPE_STEP" >> order'
    hook, said = make(f"cd {shlex.quote(str(tmp_path))}; {command}", tmp_path)
    start = time.monotonic()
    for step in range(1, 6):
        hook.start(checkpoint(tmp_path, step), step)
    assert time.monotonic() - start < 0.3
    assert len(said) == 1 and "is behind: 4 checkpoints" in said[0]
    hook.wait()
    lines = (tmp_path / "order").read_text().split("\n")
    assert lines[:4] == ["begin 1", "end 1", "begin 2", "end 2"] and len(lines) == 11
    assert hook.folders == set()


@pytest.mark.parametrize(("command", "status"), [("echo broken >&2; exit 3", 3), ("no-such-program-here", 127)])
def test_a_hook_that_fails_is_one_line_and_its_output_is_in_the_log(tmp_path, command, status):
    hook, said = make(f"SECRET=hidden; {command}", tmp_path)
    hook.start(checkpoint(tmp_path, 2), 2)
    until(lambda: not hook.folders)
    log = (tmp_path / LOG_FILE).read_text()
    (line,) = said
    assert f"status {status}" in line and "checkpoint-2" in line and LOG_FILE in line
    assert f"=== step 2: status {status} after" in log and ("broken" in log or "no-such-program-here" in log)
    # A command may hold a password.
    assert "hidden" not in log + line


def test_after_a_signal_the_waiting_ends_before_the_launcher_kills(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "6")
    hook, said = make("sleep 60", tmp_path)
    hook.start(checkpoint(tmp_path, 1), 1)
    hook.stop_soon()
    start = time.monotonic()
    hook.wait()
    assert 0.9 < time.monotonic() - start < 6
    assert "1 s at most" in said[0] and "was ended" in said[1]


@pytest.mark.parametrize(("flag", "optimizers"), [("--async_save", 3), ("--save_only_model", 0)])
def test_a_run_calls_it_for_every_complete_checkpoint(run, tmp_path, capsys, flag, optimizers):
    command = f'{STEPS}; ls "$HOPE_CHECKPOINT"; [ "$HOPE_STEP" != 4 ]'
    saves = ["--max_train_steps", "6", "--checkpointing_steps", "2", flag]
    status, rows = run("a", *saves, "--checkpoint_hook", command)
    folder, out = tmp_path / "a", capsys.readouterr().out
    assert status == 0 and rows[-1]["step"] == 6
    assert (folder / "steps").read_text().split() == ["2", "4", "6"]
    (warning,) = [line for line in out.splitlines() if line.startswith("warning: --checkpoint_hook")]
    assert "checkpoint-4" in warning and "status 1" in warning
    log = (folder / LOG_FILE).read_text()
    assert log.count("manifest.json") == 3 and log.count("optimizer.json") == optimizers
    assert {path.name for path in folder.glob("checkpoint-*")} == {"checkpoint-4", "checkpoint-6"}
    assert "checkpoint_hook" not in json.loads((folder / "run.json").read_text())["identity"]
