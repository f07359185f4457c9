"""`run_clm.py` with labels masked by the row's content, so that processes have different counts of valid tokens."""

import sys

from hope_hf.training import main, setup


class Masked:
    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        for batch, state in self.batches:
            labels = batch["labels"].clone()
            for row, first in zip(labels, batch["input_ids"][:, 0], strict=True):
                row[: int(first) * 7 % (len(row) - 2)] = -100
            yield {**batch, "labels": labels}, state


def masked_data(*arguments, **keywords):
    data = build_data(*arguments, **keywords)
    data.train = Masked(data.train)
    return data


build_data = setup.build_data

if __name__ == "__main__":
    setup.build_data = masked_data
    sys.exit(main(sys.argv[1:]))
