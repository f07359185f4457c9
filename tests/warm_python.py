"""A program like `python` that has already imported the package: a process starts in 0.1 s instead of 6.

A server imports everything once. The program sends it its arguments, environment, working directory and open files,
and the server forks a process that runs them. Signals are passed on, and when the program ends its process is killed.
The process has the program as its `sys.executable`, so a launcher starts its ranks with it too. Tests that kill
processes, count them or need a clean interpreter use the real one.
"""

import atexit
import functools
import gc
import importlib
import json
import os
import runpy
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
from pathlib import Path

PRELOADED = [
    "hope_hf.registered", "hope_hf.training.preflight.run", "hope_hf.evaluation.session", "accelerate.commands.launch",
    "evaluate",
]  # fmt: skip
# Tells a launched rank the process whose command line is that of its launcher.
CALLER = "WARM_PYTHON_CALLER"
PASSED_ON = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP]


@functools.cache
def executable() -> str:
    """Path of the program; the server ends with this process."""
    folder = Path(tempfile.mkdtemp())
    address = str(folder / "socket")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(address)
        listening.listen(64)
        file = listening.fileno()
        command = [sys.executable, "-P", __file__, "serve", str(file)]
        server = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, pass_fds=[file], start_new_session=True
        )

    def end():
        server.stdin.close()
        server.wait()
        shutil.rmtree(folder)

    atexit.register(end)
    program = folder / "python"
    call = shlex.join([sys.executable, "-I", "-S", __file__, "call", address])
    program.write_text(f'#!/bin/sh\nexec {call} "$0" "$@"\n')
    program.chmod(0o755)
    return str(program)


def call(address: str, program: str, *arguments: str) -> int:
    """The program: send the request, pass signals on, and end with the status of the process."""
    parent = int(os.environ.get(CALLER, os.getppid()))
    environment = dict(os.environ) | {CALLER: str(os.getpid())}
    request = {"program": program, "arguments": arguments, "folder": os.getcwd(), "parent": parent}
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(address)
    socket.send_fds(connection, [b" "], [0, 1, 2])
    connection.sendall(json.dumps(request | {"environment": environment}).encode() + b"\n")
    for number in PASSED_ON:
        signal.signal(number, lambda number, _: connection.sendall(b"%d\n" % number))
    status = int(connection.makefile().readline())
    if status < 0:
        for number in PASSED_ON:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    return status


def serve(file: int) -> None:
    """Import, then fork once per request, until the test run closes its end of the pipe."""
    with socket.socket(fileno=file) as server:
        for name in PRELOADED:
            importlib.import_module(name)
        # Imported objects are never collected: otherwise every process would scan all of them when it ends.
        gc.freeze()
        # The server does not wait for its children.
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        while sys.stdin not in select.select([server, sys.stdin], [], [])[0]:
            connection, _ = server.accept()
            if os.fork() == 0:
                break
            connection.close()
        else:
            return
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _, files, _, _ = socket.recv_fds(connection, 1, 3)
    lines = connection.makefile()
    request = json.loads(lines.readline())
    process = os.fork()
    if process == 0:
        lines.close()
        connection.close()
        run(request, files)
        return
    for file in (0, 1, 2, *files):
        os.close(file)

    def pass_signals_on():
        for line in lines:
            os.kill(process, int(line))
        os.kill(process, signal.SIGKILL)

    threading.Thread(target=pass_signals_on, daemon=True).start()
    _, status = os.waitpid(process, 0)
    connection.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))
    os._exit(0)


def run(request: dict, files: list[int]) -> None:
    """Do what `python ARGUMENTS` does, in this process."""
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    # New streams: the old ones know whether their first files could be sought in.
    for number, name in ((1, "stdout"), (2, "stderr")):
        old = getattr(sys, name)
        buffering = 1 if old.line_buffering else -1
        new = open(number, "w", buffering, encoding=old.encoding, errors=old.errors, closefd=False)  # noqa: SIM115
        setattr(sys, name, new)
        setattr(sys, f"__{name}__", new)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.executable, os.getppid = request["program"], lambda: request["parent"]
    arguments = request["arguments"]
    if arguments[0] == "-u":
        sys.stdout.reconfigure(write_through=True)
        arguments = arguments[1:]
    paths = os.environ["PYTHONPATH"].split(os.pathsep) if "PYTHONPATH" in os.environ else []
    first, sys.argv = arguments[0], arguments[1:] if arguments[0] in ("-c", "-m") else arguments
    sys.path[:0] = ["" if first in ("-c", "-m") else str(Path(first).parent), *paths]
    if first == "-c":
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        code, sys.argv[0] = sys.argv[0], "-c"
        exec(compile(code, "<string>", "exec"), main.__dict__)
    elif first == "-m":
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(first, run_name="__main__")


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(int(sys.argv[2]))
    else:
        sys.exit(call(*sys.argv[2:]))
