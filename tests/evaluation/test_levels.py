"""Texts read with levels that learn: the column and the rows of `perplexity`, against reading by hand."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from hope_hf import HopeCache
from hope_hf.evaluation.levels import learned_scores, level_panels, level_rows
from hope_hf.evaluation.perplexity import perplexity
from hope_hf.evaluation.streams import carried_scores

LAYERS = ("memories", "attention", "window")


@pytest.fixture
def ids():
    """Two texts that repeat a few words."""
    words = torch.randint(300, (2, 9), generator=torch.Generator().manual_seed(0))
    return words.repeat(1, 20)[:, :150]


@pytest.mark.parametrize("kind", LAYERS)
def test_learning_shows_in_its_column_rows_and_pictures(learner, arguments, kind, tmp_path):
    loaded = learner(kind)
    before = {name: value.clone() for name, value in loaded.model.state_dict().items()}
    result = perplexity(arguments(lengths="64,160", limit=2), loaded)
    positions = result.tables["Loss by position"]
    assert {"loss", "levels_learn", "window"} <= positions[0].keys()
    assert ("frozen" in positions[0]) == (kind == "memories")
    gain = result.tables["Gain of the carried state over each control, and its size"][1]["loss_minus_levels_learn"]
    assert gain == pytest.approx(positions[1]["loss"] - positions[1]["levels_learn"], abs=1e-6) and gain > 0.01
    assert result.summary[-1]["value"] == gain
    rows = result.tables["Levels that learn, by position"]
    # one text of 160 tokens in pieces of 32
    assert [row["steps"] for row in rows] == [2, 3]
    assert all(row["loss_after"] < row["loss_before"] for row in rows)
    assert all(torch.equal(value, before[name]) for name, value in loaded.model.state_dict().items())
    assert list(result.pictures) == ["loss_by_position.png", "levels.png"]
    for name, picture in result.pictures.items():
        picture(tmp_path / name)
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_rate_0_is_reading_with_levels_as_trained(learner, ids):
    model = learner(learning=dict(rate=0.0), dtype=torch.float64).model
    scores, pieces, sizes = learned_scores(model, ids)
    torch.testing.assert_close(scores.losses, carried_scores(model, ids).losses)
    (row,) = level_rows(pieces, [149], sizes)
    assert row["steps"] == 8 and row["drift"] == 0.0
    assert row["loss_after"] == pytest.approx(row["loss_before"], rel=1e-9)


@torch.no_grad()
def test_every_piece_is_scored_before_and_after_its_step(learner, ids):
    model = learner(dtype=torch.float64).model
    scores, pieces, sizes = learned_scores(model, ids)
    assert [piece.end for piece in pieces] == [32, 64, 96, 128]
    weight = model.model.layers[1].continuum.levels[0].down_proj.weight
    cache = HopeCache(model.config)
    losses = []
    for start in range(0, 149, 32):
        piece = ids[:, start : min(start + 32, 149)]
        targets = ids[:, start + 1 : start + 33]
        earlier = cache.snapshot()
        logits = model(piece, cache=cache, learn=True).logits
        losses.append(cross_entropy(logits.mT, targets, reduction="none").float())
        if start + 32 > 149:
            continue
        later = cache.snapshot()
        cache.rollback(earlier)
        cache.levels = later.levels
        again = cross_entropy(model(piece, cache=cache).logits.mT, targets, reduction="none").float()
        cache.rollback(later)
        found = pieces[start // 32]
        torch.testing.assert_close((found.before, found.after), (losses[-1].mean(1), again.mean(1)))
        (delta,) = cache.levels.deltas.values()
        torch.testing.assert_close(found.drift[:, 0], delta.norm(dim=(1, 2)) / weight.norm())
    torch.testing.assert_close(scores.losses, torch.cat(losses, 1))
    assert sizes.tolist() == [delta[0].nbytes]


def test_pieces_that_the_gate_leaves_out_are_counted_and_levels_stay(learner, ids):
    model = learner(learning=dict(gate=True), dtype=torch.float64).model
    with torch.no_grad():
        # sure of the wrong token
        model.lm_head.weight.mul_(2000)
    scores, pieces, sizes = learned_scores(model, ids)
    torch.testing.assert_close(scores.losses, carried_scores(model, ids).losses)
    (row,) = level_rows(pieces, [149], sizes)
    assert (row["steps"], row["skipped_gate"], row["skipped_not_finite"], row["drift"]) == (0, 8, 0, 0.0)
    assert row["loss_before"] is row["loss_after"] is None
    assert "level 0: left out by the gate" in level_panels(pieces)["steps so far, mean of the texts"]


def test_every_level_has_rows_of_its_own(learner, ids):
    levels = dict(level_periods=[1, 1], level_intermediate_sizes=[24, 16])
    _, pieces, sizes = learned_scores(learner(learning=dict(periods=[32, 64]), **levels).model, ids)
    rows = level_rows(pieces, [64, 149], sizes)
    places = [("1-64", 0, 4), ("1-64", 1, 2), ("65-149", 0, 4), ("65-149", 1, 2)]
    assert [(row["positions"], row["level"], row["steps"]) for row in rows] == places
    assert rows[0]["state_mib"] == 1.5 * rows[1]["state_mib"]
    # the second level steps after the second piece of a bucket, the first after both
    assert rows[1]["loss_before"] == pytest.approx(float(pieces[1].before.mean()))
    assert rows[0]["loss_before"] == pytest.approx(float((pieces[0].before + pieces[1].before).mean() / 2))


def test_batches_of_texts_are_joined(learner, arguments):
    one, two = (perplexity(arguments(lengths="64,128", limit=2, batch_size=rows), learner()).tables for rows in (1, 2))
    for row, other in zip(*(tables["Levels that learn, by position"] for tables in (one, two)), strict=True):
        assert row.pop("positions") == other.pop("positions") and row == pytest.approx(other, rel=1e-4)
