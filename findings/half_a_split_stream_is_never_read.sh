#!/usr/bin/env bash
# accelerate 1.15.0 with datasets 5.2.0: a stream that was split over the processes loses the rows of all but the first.
#
# Guess: a DataLoader over split_dataset_by_node(stream, rank, 2) that is given to `prepare` reads every row once over
# two processes; accelerate sees that the stream is split, or says something.
# Seen: for an iterable data set `prepare` makes a DataLoaderDispatcher: process 0 reads its own share and deals it out
# to both, process 1's share is never read. 8 of 16 rows, no warning. dispatch_batches=False is needed.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --no-compile torch==2.13.0 accelerate==1.15.0 datasets==5.2.0
cd "$folder"
cat > program.py <<'PROGRAM'
import torch
from accelerate import Accelerator
from datasets import IterableDataset
from datasets.distributed import split_dataset_by_node
from torch.utils.data import DataLoader


def rows_of(shards):
    for shard in shards:
        for row in range(8):
            yield {"row": 100 * shard + row}


accelerator = Accelerator(cpu=True)
stream = IterableDataset.from_generator(rows_of, gen_kwargs={"shards": [0, 1]})
share = split_dataset_by_node(stream, rank=accelerator.process_index, world_size=accelerator.num_processes)
loader = accelerator.prepare(DataLoader(share, batch_size=2))
own = [int(row) for batch in loader for row in batch["row"]]
everybody = [None, None]
torch.distributed.all_gather_object(everybody, own)
torch.distributed.destroy_process_group()
read = sorted(everybody[0] + everybody[1])
print(type(loader).__name__, "reads", read)
assert read == list(range(8)), "the behaviour changed"
PROGRAM
ACCELERATE_USE_CPU=true "$folder/env/bin/torchrun" --nproc_per_node 2 program.py
