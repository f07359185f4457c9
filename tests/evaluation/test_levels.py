"""Texts read with levels that learn: the column and the rows of `perplexity`, against reading by hand."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from hope_hf import HopeCache
from hope_hf.evaluation.levels import learned_scores
from hope_hf.evaluation.perplexity import perplexity


@pytest.fixture
def ids():
    """Two texts that repeat a few words."""
    words = torch.randint(300, (2, 9), generator=torch.Generator().manual_seed(0))
    return words.repeat(1, 20)[:, :150]


@pytest.mark.parametrize("kind", ["memories", "window"])
def test_learning_shows_in_its_column_rows_and_pictures(learner, arguments, kind, tmp_path):
    loaded = learner(kind)
    before = {name: value.clone() for name, value in loaded.model.state_dict().items()}
    result = perplexity(arguments(lengths="64,160", limit=2), loaded)
    for name, value in loaded.model.state_dict().items():
        assert torch.equal(value, before[name]), name
    _, far = result.tables["Loss by position"]
    assert ("frozen" in far) == (kind == "memories")
    _, gains = result.tables["Gain of the carried state over each control, and its size"]
    gain = gains["loss_minus_levels_learn"]
    assert gain == pytest.approx(far["loss"] - far["levels_learn"], abs=1e-6) and gain > 0.01
    assert result.summary[-1]["value"] == gain
    rows = result.tables["Levels that learn, by position"]
    # one text of 160 tokens in pieces of 32
    assert [row["steps"] for row in rows] == [2, 3]
    assert all(row["loss_after"] < row["loss_before"] for row in rows)
    draw = result.pictures["levels.png"]
    draw(tmp_path / "levels.png")
    assert (tmp_path / "levels.png").read_bytes().startswith(b"\x89PNG")


def test_every_piece_is_scored_before_and_after_its_step(learner, ids):
    model = learner(dtype=torch.float64).model
    scores, pieces, sizes = learned_scores(model, ids)
    assert [piece.end for piece in pieces] == [32, 64, 96, 128]
    weight = model.model.layers[1].continuum.levels[0].down_proj.weight
    cache = HopeCache(model.config)
    losses = []

    @torch.no_grad()
    def losses_of(start: int, **options) -> torch.Tensor:
        piece = ids[:, start : min(start + 32, 149)]
        targets = ids[:, start + 1 : start + 33]
        logits = model(piece, cache=cache, **options).logits
        return cross_entropy(logits.mT, targets, reduction="none").float()

    for piece, start in zip(pieces, (0, 32, 64, 96), strict=True):
        earlier = cache.snapshot()
        losses.append(losses_of(start, learn=True))
        later = cache.snapshot()
        cache.rollback(earlier)
        cache.levels = later.levels
        again = losses_of(start)
        cache.rollback(later)
        torch.testing.assert_close((piece.before, piece.after), (losses[-1].mean(1), again.mean(1)))
        (delta,) = cache.levels.deltas.values()
        torch.testing.assert_close(piece.drift[:, 0], delta.norm(dim=(1, 2)) / weight.norm())
    losses.append(losses_of(128, learn=True))
    torch.testing.assert_close(scores.losses, torch.cat(losses, 1))
    assert sizes.tolist() == [delta[0].nbytes]
