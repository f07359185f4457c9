"""Curves from metrics files."""

import json
import os

import pytest
from matplotlib.figure import Figure

from hope_hf.cli import results
from hope_hf.training.watch import plot
from hope_hf.training.watch.tracking import read_metrics


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
    plot.draw_curves([folder(tmp_path / "a", 3.0)], tmp_path / "loss.png")
    axes = figures[0].axes
    assert axes[-1].get_title() == "tokens per second" and axes[-1].get_ylim()[0] == 0
    assert {panel.get_xscale() for panel in axes} == {"linear"} and len({panel.get_xlim() for panel in axes}) == 1


def test_without_matplotlib_it_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "find_spec", lambda name: None)
    with pytest.warns(UserWarning, match="matplotlib is not installed"):
        assert plot.main([folder(tmp_path / "a", 3.0)]) == 1
    assert not (tmp_path / "a" / "loss.png").exists()


def test_names_are_shown_as_they_are_and_one_point_is_drawn(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *arguments, **options: figures.append(figure))
    monkeypatch.chdir(tmp_path)
    for name in ("_first", "cost_$_$"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text('{"step": 1, "tokens": 10, "train/loss": 3.0}\n')
    assert plot.main(["_first", "cost_$_$"]) == 0
    loss = figures[0].axes[0]
    assert [text.get_text().strip() for text in loss.get_legend().get_texts()] == ["_first train", r"cost_\$_\$ train"]
    assert [line.get_marker() for line in loss.lines] == ["o", "o"]
    figures[0].draw_without_rendering()


@pytest.mark.parametrize(
    "row", ["[1]", '{"step": "a", "tokens": 1}', '{"step": 1}', "[" * 9999, "no JSON", "9" * 5000]
)
def test_a_row_that_is_no_runs_is_named(tmp_path, capsys, row):
    (tmp_path / "metrics.jsonl").write_text(f'{row}\n{{"step": 1, "tokens": 10}}\n')
    assert plot.main([str(tmp_path)]) == 2
    assert "metrics.jsonl, line 1, is no row of metrics: remove the line." in capsys.readouterr().err


@pytest.mark.parametrize("value", ['"a"', "[1]", "1e999", "-1e305", "1" + "0" * 400, "true", "NaN", "1e299"])
def test_a_value_that_cannot_be_drawn_is_left_out(tmp_path, value):
    row = f'{{"step": 1, "tokens": 10, "train/loss": {value}, "train/grad_norm": 1}}\n'
    (tmp_path / "metrics.jsonl").write_text(row + row)
    assert plot.main([str(tmp_path)]) == 0


def test_metrics_that_are_no_file_are_refused(tmp_path):
    os.mkfifo(tmp_path / "metrics.jsonl")
    with pytest.raises(ValueError, match=r"metrics\.jsonl cannot be read \(it is no regular file\)"):
        read_metrics(tmp_path)


def test_folder_without_metrics(tmp_path, capsys):
    assert plot.main([str(tmp_path)]) == 2
    assert "holds no metrics.jsonl" in capsys.readouterr().err
