"""Orders of blocks: every block in its turn, shares of a mixture, any place without those before it."""

from collections import Counter

import pytest

from hope_hf.data.order import Carried, Mixed, Shuffled, apportion

COUNTS = [300, 90, 37]


def corpus_of(index):
    return 0 if index < 300 else 1 if index < 390 else 2


def epochs(order, count):
    return [[order(epoch * len(order) + place) for place in range(len(order))] for epoch in range(count)]


@pytest.mark.parametrize("order", [Shuffled(143, seed=3), Mixed(COUNTS, None, seed=3)], ids=["shuffled", "mixed"])
def test_an_epoch_reads_every_block_once_in_its_own_order(order):
    first, second, third = epochs(order, 3)
    assert sorted(first) == sorted(second) == sorted(third) == list(range(len(order)))
    assert first != second != third != first
    other = type(order)(COUNTS, None, seed=2) if isinstance(order, Mixed) else Shuffled(143, seed=2)
    assert epochs(other, 1) != [first]


@pytest.mark.parametrize("weights", [[0.2, 0.5, 0.3], [1, 1, 1], [5, 0, 1]])
def test_shares_of_an_epoch_and_of_every_stretch_are_the_weights(weights):
    order = Mixed(COUNTS, weights, seed=0)
    places = [corpus_of(order(place)) for place in range(3 * len(order))]
    shares = [weight / sum(weights) for weight in weights]
    whole = Counter(places[: len(order)])
    assert [whole[corpus] for corpus in range(3)] == order.shares
    for corpus, share in enumerate(shares):
        assert abs(whole[corpus] - share * len(order)) < 1
        for start in range(0, len(places) - 256, 64):
            # The windows at both ends are read in part.
            assert abs(places[start : start + 256].count(corpus) - share * 256) <= 24


def test_a_small_corpus_of_a_large_weight_is_read_again_before_any_block_twice():
    order = Mixed(COUNTS, [0, 0, 1], seed=0)
    places = [order(place) for place in range(370)]
    rounds = [places[start : start + 37] for start in range(0, 370, 37)]
    assert all(sorted(read) == list(range(390, 427)) for read in rounds)
    assert len(set(map(tuple, rounds))) == len(rounds)


def test_a_large_corpus_of_a_small_weight_goes_on_in_the_next_epoch():
    order = Mixed([8, 8], [3, 1], seed=0)
    read = [place for place in map(order, range(2 * len(order))) if place >= 8]
    assert sorted(read) == list(range(8, 16))


def test_a_place_does_not_depend_on_what_was_read_before():
    whole = [Mixed(COUNTS, [2, 1, 1], seed=4)(place) for place in range(900)]
    order = Mixed(COUNTS, [2, 1, 1], seed=4)
    assert [order(place) for place in reversed(range(900))] == whole[::-1]


def test_rows_that_are_carried_on_follow_each_other():
    order = Carried(12, rows=3)
    batches = [[order(place) for place in range(3 * step, 3 * step + 3)] for step in range(5)]
    assert batches[:4] == [[0, 4, 8], [1, 5, 9], [2, 6, 10], [3, 7, 11]] and batches[4] == [4, 8, 0]


def test_parts_are_whole_and_sum_to_the_total():
    assert apportion(7, [0.3, 0.3, 0.2, 0.1, 0.1, 0]) == [2, 2, 1, 1, 1, 0]
    assert apportion(12345678, [0.3, 0.3, 0.4]) == [3703704, 3703703, 4938271]
