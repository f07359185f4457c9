"""Orders of blocks: every block in its turn, shares of a mixture, the next epoch."""

import pytest

from hope_hf.data.order import Mixed, Shuffled, apportion

COUNTS = [300, 90, 37]


def corpus_of(block: int) -> int:
    """The corpus of a block of the mixture."""
    if block < 300:
        return 0
    return 1 if block < 390 else 2


def epoch_of(order, number: int) -> list[int]:
    start = number * len(order)
    return [order(place) for place in range(start, start + len(order))]


@pytest.mark.parametrize("kind", ["shuffled", "mixed"])
def test_an_epoch_reads_every_block_once_in_its_own_order(kind):
    if kind == "shuffled":
        order, other = Shuffled(143, seed=3), Shuffled(143, seed=2)
    else:
        order, other = Mixed(COUNTS, None, seed=3), Mixed(COUNTS, None, seed=2)
    orders = [epoch_of(order, 0), epoch_of(order, 1), epoch_of(order, 2), epoch_of(other, 0)]
    assert all(sorted(blocks) == list(range(len(order))) for blocks in orders)
    assert len(set(map(tuple, orders))) == 4


@pytest.mark.parametrize("weights", [[0.2, 0.5, 0.3], [5, 0, 1]])
def test_shares_of_an_epoch_and_of_every_stretch_are_the_weights(weights):
    order = Mixed(COUNTS, weights, seed=0)
    corpora = [corpus_of(order(place)) for place in range(3 * len(order))]
    first_epoch = corpora[: len(order)]
    for corpus, weight in enumerate(weights):
        share = weight / sum(weights)
        assert first_epoch.count(corpus) == order.shares[corpus]
        assert abs(order.shares[corpus] - share * len(order)) < 1
        for start in range(0, len(corpora) - 256, 64):
            # The windows at both ends are read in part.
            stretch = corpora[start : start + 256]
            assert abs(stretch.count(corpus) - share * 256) <= 24


def test_a_small_corpus_of_a_large_weight_is_read_again_before_any_block_twice():
    order = Mixed(COUNTS, [0, 0, 1], seed=0)
    rounds = set()
    for start in range(0, 370, 37):
        blocks = [order(place) for place in range(start, start + 37)]
        assert sorted(blocks) == list(range(390, 427))
        rounds.add(tuple(blocks))
    assert len(rounds) == 10


def test_a_large_corpus_of_a_small_weight_goes_on_in_the_next_epoch():
    order = Mixed([8, 8], [3, 1], seed=0)
    blocks = epoch_of(order, 0) + epoch_of(order, 1)
    assert sorted(block for block in blocks if block >= 8) == list(range(8, 16))


def test_parts_are_whole_and_sum_to_the_total():
    assert apportion(7, [0.3, 0.3, 0.2, 0.1, 0.1, 0]) == [2, 2, 1, 1, 1, 0]
    assert apportion(12345678, [0.3, 0.3, 0.4]) == [3703704, 3703703, 4938271]
