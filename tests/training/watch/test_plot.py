"""Curves from metrics files."""

import json
import os

import pytest
from matplotlib.figure import Figure

from hope_hf.common import results
from hope_hf.training.watch import plot
from hope_hf.training.watch.metrics_file import read_metrics
from hope_hf.training.watch.plot import LAYER_PANELS

# A run that was killed while writing leaves half a row.
HALF = '{"step": 4, "tok'


def folder(path, loss):
    path.mkdir()
    rows = [{"step": s, "tokens": 10 * s, "train/loss": loss / s, "train/grad_norm": None} for s in (1, 2, 3)]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + HALF)
    return str(path)


@pytest.fixture
def figures(monkeypatch) -> list[Figure]:
    """What is drawn, in place of files."""
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *arguments, **options: drawn.append(figure))
    return drawn


def test_one_folder_gets_its_own_picture_and_several_share_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first = folder(tmp_path / "first", 3.0)
    second = folder(tmp_path / "second", 4.0)
    assert plot.main([first]) == 0
    assert (tmp_path / "first" / "loss.png").read_bytes()[:4] == b"\x89PNG"
    assert plot.main([first, second]) == 0
    assert (tmp_path / "loss.png").read_bytes() != (tmp_path / "first" / "loss.png").read_bytes()


def test_names_are_shown_as_they_are_and_one_point_is_drawn(tmp_path, monkeypatch, figures):
    """matplotlib hides names that begin with `_`, and reads formulas between dollars."""
    monkeypatch.chdir(tmp_path)
    for name in ("_first", "cost_$_$"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text('{"step": 1, "tokens": 10, "train/loss": 3.0}\n')
    assert plot.main(["_first", "cost_$_$"]) == 0
    loss = figures[0].axes[0]
    first, second = loss.get_legend().get_texts()
    assert first.get_text().strip().startswith("_first")
    assert second.get_text().startswith(r"cost_\$_\$")
    assert [line.get_marker() for line in loss.lines] == ["o", "o"]
    figures[0].draw_without_rendering()


@pytest.mark.parametrize("row", ["[1]", '{"step": "a", "tokens": 1}', "[" * 9999, "9" * 5000])
def test_a_row_that_is_no_runs_is_named(tmp_path, capsys, row):
    (tmp_path / "metrics.jsonl").write_text(f'{row}\n{{"step": 1, "tokens": 10}}\n')
    assert plot.main([str(tmp_path)]) == 2
    assert "metrics.jsonl, line 1," in capsys.readouterr().err


def test_a_value_that_cannot_be_drawn_is_left_out(tmp_path):
    row = '{{"step": 1, "tokens": 10, "train/loss": {}, "train/grad_norm": 1}}\n'
    values = ['"a"', "[1]", "1e999", "-1e305", "1" + "0" * 400, "true", "NaN", "1e299"]
    (tmp_path / "metrics.jsonl").write_text("".join(row.format(value) for value in values))
    assert plot.main([str(tmp_path)]) == 0


def test_metrics_that_are_no_file_are_refused(tmp_path, capsys):
    assert plot.main([str(tmp_path)]) == 2
    assert "holds no metrics.jsonl" in capsys.readouterr().err
    os.mkfifo(tmp_path / "metrics.jsonl")
    with pytest.raises(ValueError, match=r"metrics\.jsonl cannot be read"):
        read_metrics(tmp_path)


@pytest.fixture
def run(tmp_path):
    """A folder with rows of two layers and two levels; a gradient that is not finite is null."""
    keys = [key for panel in LAYER_PANELS for key in panel.names]
    rows = []
    for step in (1, 2, 3):
        row = {"step": step, "tokens": 100 * step, "level/0/updates": step, "level/1/updates": step // 2}
        for layer in (0, 1):
            row |= {f"memory/{layer}/{key}": step + layer / 10 for key in keys}
        rows.append(row)
    rows[1]["memory/0/initial_state_grad_norm"] = None
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def test_memory_png_shows_every_layer_and_level(run, figures, capsys):
    assert plot.main([str(run), "--memory"]) == 0
    assert capsys.readouterr().out == f"{run}/memory.png\n"
    panels = [axis.lines for axis in figures[0].axes if axis.has_data()]
    assert {len(lines) for lines in panels} <= {2, 4}
    assert list(panels[0][1].get_ydata()) == [1.1, 2.1, 3.1]
    assert list(panels[-1][1].get_ydata()) == [0, 1, 1]


def test_what_cannot_be_drawn_is_refused(run, capsys):
    llama = folder(run / "llama", 3.0)
    for words, named in (([str(run), str(run)], "name one folder"), ([llama], "a HOPE")):
        assert plot.main([*words, "--memory"]) == 2
        assert named in capsys.readouterr().err


def test_without_matplotlib_it_says_what_to_install(run, monkeypatch):
    monkeypatch.setattr(results, "find_spec", lambda name: None)
    with pytest.warns(UserWarning, match="matplotlib is not installed"):
        assert plot.main([str(run), "--memory"]) == 1
