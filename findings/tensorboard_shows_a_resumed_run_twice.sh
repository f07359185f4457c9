#!/usr/bin/env bash
# torch 2.13.0 and tensorboard 2.21.0: a run that was killed at step 9 and resumed from step 5 into the same folder
# shows steps 5 to 7 twice.
#
# Guess: the reader drops the older values, since the steps of the new file begin before the end of the old one.
# Seen: only a writer made with purge_step=5 makes it drop them; without it both values stand, and the curve runs back.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --no-compile torch==2.13.0 tensorboard==2.21.0 numpy
cd "$folder"
"$folder/env/bin/python" - <<'PROGRAM'
import logging
import time

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

logging.disable()


def steps_of(folder, **options):
    first = SummaryWriter(folder)
    for step in range(10):
        first.add_scalar("loss", 1.0, step)
    first.close()
    time.sleep(1.1)  # the name of a file has seconds
    second = SummaryWriter(folder, **options)
    for step in range(5, 8):
        second.add_scalar("loss", 2.0, step)
    second.close()
    events = EventAccumulator(folder)
    events.Reload()
    return [event.step for event in events.Scalars("loss")]


plain, purged = steps_of("plain"), steps_of("purged", purge_step=5)
print(plain, purged)
assert plain == [*range(10), 5, 6, 7] and purged == list(range(8)), "the behaviour changed"
PROGRAM
