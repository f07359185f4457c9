"""State tracking: the groups are groups, and the targets are the products of permutations."""

from itertools import permutations

import pytest
import torch

from hope_hf.evaluation.synthetic.state_tracking import GROUPS, is_even, state_tracking


@pytest.mark.parametrize(("name", "size"), [("s3", 6), ("a5", 60)])
def test_every_table_is_that_of_a_group(name, size):
    table = GROUPS[name]
    everything = torch.arange(size)
    assert table.shape == (size, size)
    # the first element changes nothing
    assert torch.equal(table[0], everything) and torch.equal(table[:, 0], everything)
    # every row and column holds every element once: there are inverses
    assert torch.equal(table.sort(0).values, everything[:, None].expand(size, size))
    assert torch.equal(table.sort(1).values, everything.expand(size, size))
    # (ab)c = a(bc)
    assert torch.equal(table[table][:, :, everything], table[everything[:, None, None], table[None]])
    assert not torch.equal(table, table.T)


@pytest.mark.parametrize("name", GROUPS)
def test_targets_are_what_a_row_of_things_has_become(name):
    things = {"s3": 3, "a5": 5}[name]
    elements = [element for element in permutations(range(things)) if name == "s3" or is_even(element)]
    batch = state_tracking()[name].draw(3, torch.Generator().manual_seed(0), 1)
    assert batch.input_ids.shape == batch.targets.shape == (3, 64) and batch.mask.all()
    for word, targets in zip(batch.input_ids.tolist(), batch.targets.tolist(), strict=True):
        state = list(range(things))
        for symbol, target in zip(word, targets, strict=True):
            # the thing at place i is replaced by what the symbol names for it
            state = [elements[symbol][thing] for thing in state]
            assert tuple(state) == elements[target]


def test_training_words_have_32_symbols():
    assert state_tracking()["s3"].draw(2, torch.Generator().manual_seed(0), None).input_ids.shape == (2, 32)
    assert state_tracking()["a5"].bins == ("32", "64")


@pytest.mark.parametrize(("permutation", "expected"), [((0, 1, 2), True), ((1, 0, 2), False), ((1, 2, 0), True)])
def test_even_permutations_are_products_of_an_even_number_of_swaps(permutation, expected):
    assert is_even(permutation) == expected
