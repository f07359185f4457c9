"""Texts read with levels that learn: the column and the rows of `perplexity`, against reading by hand."""

import pytest
import torch

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
    number = {"number": "loss saved by levels that learn, tokens 65-160", "value": gain}
    assert result.summary[-1].items() >= number.items()
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


def test_every_piece_is_scored_before_and_after_its_step(learner, ids):
    model = learner(dtype=torch.float64).model
    scores, pieces, sizes = learned_scores(model, ids)
    cache, losses = HopeCache(model.config), []
    for start in range(0, 149, 32):
        piece, targets = ids[:, start : min(start + 32, 149)], ids[:, start + 1 : start + 33]
        earlier = cache.snapshot()
        with torch.no_grad():
            found = model(piece, cache=cache, learn=True).logits
            losses.append(torch.nn.functional.cross_entropy(found.mT, targets, reduction="none").float())
            if start + 32 > 149:
                continue
            later = cache.snapshot()
            cache.rollback(earlier)
            cache.levels = later.levels
            again = model(piece, cache=cache).logits
            cache.rollback(later)
        again = torch.nn.functional.cross_entropy(again.mT, targets, reduction="none").float()
        told = pieces[start // 32]
        torch.testing.assert_close((told.before, told.after), (losses[-1].mean(1), again.mean(1)))
        assert (told.after < told.before).all()
        (delta,) = cache.levels.deltas.values()
        weight = model.model.layers[1].continuum.levels[0].down_proj.weight
        torch.testing.assert_close(told.drift[:, 0], delta.norm(dim=(1, 2)) / weight.norm())
    torch.testing.assert_close(scores.losses, torch.cat(losses, 1))
    assert [piece.end for piece in pieces] == [32, 64, 96, 128] and sizes.tolist() == [delta[0].nbytes]


def test_a_text_without_steps_is_a_text_read_by_frozen_levels(learner, ids):
    """Pieces that the gate leaves out are counted, and levels stay as they are."""
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
    assert [(row["positions"], row["level"], row["steps"]) for row in rows] == [
        ("1-64", 0, 4), ("1-64", 1, 2), ("65-149", 0, 4), ("65-149", 1, 2),
    ]  # fmt: skip
    assert rows[0]["drift"] != rows[1]["drift"] and rows[0]["state_mib"] == 1.5 * rows[1]["state_mib"]
    # the second level steps after the second piece of a bucket, the first after both
    assert rows[1]["loss_before"] == pytest.approx(float(pieces[1].before.mean()))
    assert rows[0]["loss_before"] == pytest.approx(float((pieces[0].before + pieces[1].before).mean() / 2))


def test_batches_of_texts_are_joined(learner, arguments):
    found = []
    for rows_at_a_time in (1, 2):
        options = dict(lengths="64,128", limit=2, batch_size=rows_at_a_time)
        found.append(perplexity(arguments(**options), learner()).tables["Levels that learn, by position"])
    for row, other in zip(*found, strict=True):
        assert row.pop("positions") == other.pop("positions") and row == pytest.approx(other, rel=1e-4)


def test_a_text_beyond_the_positions_has_no_such_column(learner, arguments):
    tables = perplexity(arguments(lengths="64,600", samples_per_length=1), learner("attention")).tables
    assert "levels_learn" not in tables["Loss by position"][0] and "Levels that learn, by position" not in tables
