"""The metric of right tokens."""

import torch

from hope_hf.training.evaluate import right_tokens


def test_right_tokens_are_those_that_are_ranked_first():
    labels = torch.tensor([[5, 1, 2, 3], [4, 4, -100, -100]])
    logits = torch.zeros(2, 4, 6)
    # Predicts 1, 2, 0 for the first row and 4 for the second: three of four.
    for row, column, token in [(0, 0, 1), (0, 1, 2), (0, 2, 0), (1, 0, 4), (1, 1, 3)]:
        logits[row, column, token] = 1.0
    assert right_tokens(logits, labels) == 3
    assert right_tokens(logits, labels) == 3


def test_without_a_token_to_predict_none_is_right():
    assert right_tokens(torch.zeros(1, 2, 3), torch.tensor([[1, -100]])) == 0


def test_the_last_position_predicts_nothing():
    logits = torch.zeros(1, 2, 3)
    logits[0, 0, 2], logits[0, 1, 1] = 1.0, 1.0
    assert right_tokens(logits, torch.tensor([[1, 2]])) == 1
    assert right_tokens(logits, torch.tensor([[2, 1]])) == 0
