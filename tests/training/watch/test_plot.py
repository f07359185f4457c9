"""Curves from metrics files."""

import json
import sys

import pytest
from matplotlib.figure import Figure

from hope_hf.training.watch import plot


def folder(path, loss):
    path.mkdir()
    rows = [{"step": s, "tokens": 10 * s, "train/loss": loss / s, "train/grad_norm": None} for s in (1, 2, 3)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    # A run that was killed while writing leaves half a row.
    (path / "metrics.jsonl").write_text(text + '{"step": 4, "tok')
    return str(path)


def test_one_folder_gets_its_own_picture_and_several_share_one(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    first, second = folder(tmp_path / "first", 3.0), folder(tmp_path / "second", 4.0)
    assert plot.main([first]) == 0
    assert (tmp_path / "first" / "loss.png").read_bytes()[:4] == b"\x89PNG"
    assert plot.main([first, second]) == 0
    assert (tmp_path / "loss.png").read_bytes() != (tmp_path / "first" / "loss.png").read_bytes()


def test_all_panels_share_one_axis_of_tokens(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *arguments, **options: figures.append(figure))
    plot.plot([folder(tmp_path / "a", 3.0)], tmp_path / "loss.png")
    axes = figures[0].axes
    assert axes[-1].get_title() == "tokens per second" and axes[-1].get_ylim()[0] == 0
    assert {panel.get_xscale() for panel in axes} == {"linear"} and len({panel.get_xlim() for panel in axes}) == 1


def test_without_matplotlib_it_says_so_and_goes_on(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.warns(UserWarning, match="matplotlib is not installed"):
        assert plot.plot([folder(tmp_path / "a", 3.0)], tmp_path / "loss.png") is None
    assert not (tmp_path / "loss.png").exists()


def test_folder_without_metrics(tmp_path, capsys):
    assert plot.main([str(tmp_path)]) == 2
    assert "holds no metrics.jsonl" in capsys.readouterr().err
