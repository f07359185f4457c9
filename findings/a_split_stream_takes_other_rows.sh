#!/usr/bin/env bash
# datasets 5.2.0: after `take` and `skip`, split_dataset_by_node deals out other rows than the stream without it.
#
# Guess: the nodes together read the rows of `stream.take(9)`, each once; so stream.take(9) and stream.skip(9) stay
# apart.
# Seen: where the files divide evenly among the nodes, the count is divided and each node takes and skips in its own
# files. With two files of 7 rows, take(9) reads other rows on two nodes, and what take(5) holds out for evaluation in
# one process is trained on by the nodes of skip(5). No warning.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --no-compile datasets==5.2.0
cd "$folder"
"$folder/env/bin/python" - <<'PROGRAM'
from datasets import IterableDataset
from datasets.distributed import split_dataset_by_node


def rows_of(shards):
    for shard in shards:
        for row in range(7):
            yield {"row": 100 * shard + row}


def stream():
    return IterableDataset.from_generator(rows_of, gen_kwargs={"shards": [0, 1]})


def on_two_nodes(rows):
    parts = [split_dataset_by_node(rows, rank=rank, world_size=2) for rank in range(2)]
    return {row["row"] for part in parts for row in part}


alone = {row["row"] for row in stream().take(9)}
nodes = on_two_nodes(stream().take(9))
held_out = {row["row"] for row in stream().take(5)}
trained = on_two_nodes(stream().skip(5))
print("take(9):", sorted(alone), "on two nodes:", sorted(nodes))
print("held out by take(5) and trained on by skip(5):", sorted(held_out & trained))
assert len(alone) == len(nodes) == 9 and alone != nodes and held_out & trained, "the behaviour changed"
PROGRAM
