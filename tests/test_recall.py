"""The memory is used: a small HOPE learns to recall what it read once, and cannot if nothing is written."""

import pytest
import torch

from benchmarks.recall import recall_batch, train_recall

# 4 pairs, then all keys in another order. Chance: 1/8 over all values, 1/4 over the written ones. The learning rate is
# constant, so accuracy around step 200 moves by a tenth, and differs with the processor's rounding.
SMALL = dict(steps=400, pairs=4, symbols=8, batch_size=32, learning_rate=6e-3, seed=1)


def test_recall_is_learned_through_the_memory():
    assert train_recall(frozen=False, stop_at=0.97, report_every=25, **SMALL) > 0.95


def test_frozen_memories_stay_at_chance():
    assert train_recall(frozen=True, report_every=250, **SMALL) < 0.25


@pytest.mark.long
def test_recall_of_eight_pairs_is_learned_through_the_memory():
    """Chance: 1/32 over all values, 1/8 over the written ones. The step at which it is learned depends on the seed."""
    assert train_recall(frozen=False, steps=800, stop_at=0.97, seed=1) > 0.95


@pytest.mark.long
def test_frozen_memories_recall_none_of_eight_pairs():
    assert train_recall(frozen=True, steps=600, report_every=600, seed=1) < 0.125


def test_the_task_asks_every_key_once_and_scores_its_value():
    input_ids, labels = recall_batch(50, 8, 32, torch.Generator().manual_seed(0))
    written, asked = input_ids[:, :16].unflatten(1, (8, 2)), input_ids[:, 16:].unflatten(1, (8, 2))
    for row in range(50):
        pairs = dict(written[row].tolist())
        assert dict(asked[row].tolist()) == pairs
        assert len(pairs) == len(set(pairs.values())) == 8
    scored = labels != -100
    assert torch.equal(scored.nonzero()[:, 1].unique(), torch.arange(17, 32, 2))
    assert torch.equal(labels[scored], input_ids[scored])
    assert not torch.equal(written, asked)
