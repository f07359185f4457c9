"""Losses of a text read once in pieces, and in windows, against one plain forward pass."""

import pytest
import torch
import torch.nn.functional as F

from hope_hf.evaluation import streams
from hope_hf.evaluation.streams import carried_scores, window_scores


@torch.no_grad()
def plain_losses(model, input_ids):
    """[B, T-1] from one forward pass over everything."""
    logits = model(input_ids=input_ids, use_cache=False).logits[:, :-1]
    return F.cross_entropy(logits.transpose(1, 2), input_ids[:, 1:], reduction="none").float()


@pytest.fixture
def ids():
    return torch.randint(300, (2, 50), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("kind", ["hope", "llama"])
def test_a_text_read_in_pieces_is_a_text_read_at_once(subject, ids, kind, monkeypatch):
    monkeypatch.setattr(streams, "PIECE", 13)
    model, ends = subject(kind, dtype="float64").model, []
    scores = carried_scores(model, ids, lambda end, cache: ends.append(end), [5, 26, 1000])
    assert ends == [5, 13, 26, 39, 49]
    torch.testing.assert_close(scores.losses, plain_losses(model, ids))
    with torch.no_grad():
        assert torch.equal(scores.guesses, model(input_ids=ids).logits[:, :-1].argmax(-1))


@pytest.mark.parametrize("kind", ["hope", "llama"])
def test_padding_on_the_right_changes_no_score(subject, ids, kind, monkeypatch):
    monkeypatch.setattr(streams, "PIECE", 16)
    model = subject(kind, dtype="float64").model
    padded = ids.clone()
    padded[0, 21:] = 0
    scores = carried_scores(model, padded)
    torch.testing.assert_close(scores.losses[0, :20], plain_losses(model, ids[:1, :21])[0])
    torch.testing.assert_close(scores.losses[1], plain_losses(model, ids[1:])[0])


@pytest.mark.parametrize("window, stride", [(17, 16), (16, 8), (49, 7), (80, 40)])
def test_windows_know_only_what_they_hold(subject, ids, window, stride):
    model = subject(dtype="float64").model
    scores = window_scores(model, ids[0], window, stride, batch_size=3)
    for token in range(1, 50):
        start = 0 if token < window else -(-(token - window + 1) // stride) * stride
        expected = plain_losses(model, ids[:1, start : token + 1])[0, -1]
        torch.testing.assert_close(scores.losses[token - 1], expected)
