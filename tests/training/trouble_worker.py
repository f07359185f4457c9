"""`run_clm.py` with something wrong on the second process: trouble_worker.py TROUBLE FLAGS."""

import math
import os
import sys
import time

from hope_hf.training import main, setup, trainer

SLOW_SECONDS = 0.4


def nan_at_step_3():
    """A loss that is not finite, once."""
    loss, calls = trainer.summed_loss, []

    def summed_loss(*arguments):
        calls.append(1)
        return loss(*arguments) * (math.nan if len(calls) == 3 else 1)

    trainer.summed_loss = summed_loss


def slow_data():
    """Waits for each batch."""
    build = setup.build_data

    def build_data(*arguments, **keywords):
        data = build(*arguments, **keywords)
        data.train.loader = Slow(data.train.loader)
        return data

    setup.build_data = build_data


class Slow:
    def __init__(self, loader):
        self.loader, self.batches_per_epoch = loader, loader.batches_per_epoch

    def __iter__(self):
        for batch in self.loader:
            time.sleep(SLOW_SECONDS)
            yield batch


def hang_at_step_3():
    """Never comes to its third forward pass."""
    inputs, calls = trainer.model_inputs, []

    def model_inputs(batch):
        calls.append(1)
        if len(calls) == 3:
            time.sleep(3600)
        return inputs(batch)

    trainer.model_inputs = model_inputs


if __name__ == "__main__":
    if os.environ["RANK"] == "1":
        for trouble in sys.argv[1].split(","):
            globals()[trouble]()
    sys.exit(main(sys.argv[2:]))
