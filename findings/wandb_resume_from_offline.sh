#!/usr/bin/env bash
# wandb 0.31.0: `resume_from` offline leaves the rows that it should take back, and run.step is 0 where rows go on at 5.
#
# Guess: offline, resume_from="one?_step=4" is refused, since taking back needs the server, or who reads the two files
# finds every step once and run.step is 5.
# Seen: init succeeds. The first file keeps steps 5 to 9 and the second has 5 to 7 again; only a branch point in the
# second one's run record says so, for a later sync. run.step is 0 and `resumed` False until the first row is logged,
# so that a loop which starts at run.step with log(step=...) loses its rows; a line on stderr says that each is ignored.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --no-compile wandb==0.31.0
cd "$folder"
WANDB_SILENT=true "$folder/env/bin/python" - <<'PROGRAM'
import struct
from pathlib import Path

import wandb
from wandb.proto.wandb_internal_pb2 import Record


def records(file):
    """The records of a .wandb file: after 7 bytes, blocks of 32 KiB with records of checksum, length and kind."""
    data, at, parts = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        rest = 32768 - at % 32768
        _, length, kind = struct.unpack_from("<IHB", data, at)
        if rest < 7 or kind == 0:
            at += rest
            continue
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            yield Record.FromString(parts)
            parts = b""


def steps_and_branch(file):
    steps, branch = [], None
    for record in records(file):
        if record.HasField("history"):
            steps += [int(item.value_json) for item in record.history.item if "_step" in (item.key, *item.nested_key)]
        if record.HasField("run") and record.run.HasField("branch_point"):
            branch = record.run.branch_point.value
    return steps, branch


def log(rows, explicit=False, **options):
    """run.step and run.resumed at the beginning, and the file."""
    with wandb.init(mode="offline", project="findings", **options) as run:
        begins = run.step, run.resumed
        for row in range(rows):
            run.log({"loss": 1.0 / (row + 1)}, step=begins[0] + row if explicit else None)
    return begins, Path(run.dir).parent / "run-one.wandb"


_, killed = log(10, id="one")
begins, resumed = log(3, resume_from="one?_step=4")
_, stepped = log(3, resume_from="one?_step=4", explicit=True)
wandb.teardown()  # the files are whole only then
first, second, third = (steps_and_branch(file) for file in (killed, resumed, stepped))
print("run.step and resumed:", begins, "steps and branch point:", first, second, "with run.step:", third)
assert begins == (0, False) and first == (list(range(10)), None), "the behaviour changed"
assert second == ([5, 6, 7], 4) and third == ([], 4), "the behaviour changed"
PROGRAM
