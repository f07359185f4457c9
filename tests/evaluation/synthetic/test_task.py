"""Loss and score of a synthetic task against explicit sums."""

import math

import pytest
import torch

from hope_hf.evaluation.synthetic.task import Batch, chance, loss, score

BIG = 10.0


def set_batch() -> tuple[torch.Tensor, Batch]:
    """Two rows of three positions, of which the second row scores two; logits that are all right."""
    targets = torch.tensor([[[1, 0], [0, 1], [1, 1]], [[0, 1], [1, 0], [0, 0]]]).bool()
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]]).bool()
    return torch.where(targets, BIG, -BIG), Batch(torch.zeros(2, 3, dtype=torch.long), targets, mask)


def test_a_word_is_right_only_if_every_scored_set_is():
    logits, batch = set_batch()
    assert score(logits, batch).tolist() == [1, 1]
    unscored = logits.clone()
    unscored[1, 2] = BIG
    assert score(unscored, batch).tolist() == [1, 1]
    for row in range(2):
        for position in range(2):
            for symbol in range(2):
                wrong = logits.clone()
                wrong[row, position, symbol] *= -1
                assert score(wrong, batch).tolist() == [float(row != 0), float(row != 1)]


def test_a_logit_of_zero_is_no_symbol_of_the_set():
    logits, batch = set_batch()
    logits[0, 0, 0] = 0
    assert score(logits, batch).tolist() == [0, 1]


def test_symbols_are_scored_by_the_share_of_right_ones():
    targets = torch.tensor([[1, 2, 0], [2, 2, 2]])
    mask = torch.tensor([[True, True, True], [True, True, False]])
    guesses = torch.tensor([[1, 0, 0], [0, 2, 2]])
    logits = torch.nn.functional.one_hot(guesses, 3).double()
    assert score(logits, Batch(targets, targets, mask)).tolist() == [2 / 3, 1 / 2]


def test_losses_are_means_over_what_is_scored():
    logits, batch = set_batch()
    logits[~batch.mask] = math.nan
    assert loss(logits, batch).item() == pytest.approx(math.log1p(math.exp(-BIG)), rel=1e-2)
    targets = torch.tensor([[0, 1, -100]])
    logits = torch.tensor([[[1.0, 2.0], [0.0, 3.0], [9.0, 9.0]]])
    expected = (math.log(math.exp(1) + math.exp(2)) - 1 + math.log(1 + math.exp(3)) - 3) / 2
    assert loss(logits, Batch(targets, targets, targets >= 0)).item() == pytest.approx(expected)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_no_numbers_have_no_score(bad):
    logits, batch = set_batch()
    logits[0, 1, 0] = bad
    with pytest.raises(ValueError, match="not finite"):
        score(logits, batch)


def test_distinct_keeps_the_first_of_each_sample():
    ids = torch.tensor([[1, 2], [1, 2], [3, 2], [1, 2]])
    mask = torch.tensor([[True, True], [True, True], [True, True], [True, False]])
    kept = Batch(ids, torch.arange(4)[:, None].expand(4, 2), mask).distinct()
    assert kept.targets[:, 0].tolist() == [0, 2, 3] and len(kept) == 3


def test_chance_is_the_mean_score_of_drawn_answers():
    """Sets: the mean over all 64 answers to three positions of two symbols; symbols: one of four."""
    _, batch = set_batch()
    answers = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0])] * 6).view(64, 1, 3, 2).expand(-1, 2, -1, -1)
    found = torch.stack([score(answer, batch) for answer in answers])
    assert chance(batch, 2) == pytest.approx(float(found.mean()))
    symbols = Batch(torch.zeros(1, 2, dtype=torch.long), torch.tensor([[1, 3]]), torch.ones(1, 2, dtype=torch.bool))
    assert chance(symbols, 4) == 0.25
