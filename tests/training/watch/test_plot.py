"""Curves from metrics files."""

import json
import os

import pytest
from matplotlib.figure import Figure

from hope_hf.common import results
from hope_hf.training.watch import plot
from hope_hf.training.watch.plot import LAYER_PANELS, LEVEL_PANELS, SHARES, SPARSE_PANELS
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
    assert figures[0].get_suptitle() == "a" and [text.get_text() for text in axes[0].get_legend().get_texts()] == [
        "training"
    ]
    assert (
        axes[0].get_ylabel() == "nats per token"
        and axes[-1].get_ylabel() == "tokens per second"
        and axes[-1].get_ylim()[0] == 0
    )
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
    assert [text.get_text().strip() for text in loss.get_legend().get_texts()] == [
        "_first, training", r"cost_\$_\$, training"
    ]  # fmt: skip
    assert figures[0].get_suptitle() == "2 runs"
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
    with pytest.raises(ValueError, match=r"metrics\.jsonl cannot be read \(it is not a regular file\)"):
        read_metrics(tmp_path)


def test_folder_without_metrics(tmp_path, capsys):
    assert plot.main([str(tmp_path)]) == 2
    assert "holds no metrics.jsonl" in capsys.readouterr().err


@pytest.fixture
def run(tmp_path):
    """A folder with rows of two layers and three levels."""
    rows = []
    for step in (1, 2, 3):
        row = {"step": step, "tokens": 100 * step}
        for layer in (0, 1):
            keys = [key for panel in LAYER_PANELS for key in panel.names]
            row |= {f"memory/{layer}/{key}": step + layer / 10 for key in keys}
        row |= {f"level/{level}/updates": step // (level + 1) for level in range(3)}
        rows.append(row)
    # Not finite gradients are null.
    rows[1]["memory/0/initial_state_grad_norm"] = None
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def test_memory_png_shows_every_key_of_every_layer_and_level(run, monkeypatch, capsys):
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *arguments, **options: figures.append(figure))
    assert plot.main([str(run), "--memory"]) == 0
    assert capsys.readouterr().out == f"{run}/memory.png\n"
    lines = [[line.get_ydata() for line in axis.lines] for axis in figures[0].axes]
    assert [len(panel) for panel in lines] == [2, 2, 4, 2, 2, 3]
    assert list(lines[0][1]) == [1.1, 2.1, 3.1] and list(lines[4][0]) == [1, 3]
    assert list(lines[5][1]) == [0, 1, 1]


def test_memory_png_shows_sparse_attention_where_there_is_some(run, monkeypatch):
    rows = [json.loads(line) for line in (run / "metrics.jsonl").open()]
    for row in rows:
        keys = [key for panel in SPARSE_PANELS for key in panel.names]
        row |= {f"sparse/{layer}/{key}": row["step"] for layer in (1, "all") for key in (*keys, *SHARES)}
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *arguments, **options: figures.append(figure))
    assert plot.main([str(run), "--memory"]) == 0
    panels = [axis for axis in figures[0].axes if axis.has_data()]
    # one layer has it; its share of the three branches is drawn over all layers
    assert [len(axis.lines) for axis in panels] == [2, 2, 4, 2, 2, 2, 2, 3, 3]
    assert panels[-2].get_title() == "sparse attention: branches"
    assert list(panels[5].lines[0].get_ydata()) == [1, 2, 3]


def test_memory_png_shows_what_levels_learn_where_they_do(run, monkeypatch):
    """An attention model has no panels of memories."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").open()]
    for row in rows:
        for name in [name for name in row if name.startswith("memory/")]:
            del row[name]
        for level in range(3):
            row |= {f"level/{level}/{key}": row["step"] + level for panel in LEVEL_PANELS[1:] for key in panel.names}
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *arguments, **options: figures.append(figure))
    assert plot.main([str(run), "--memory"]) == 0
    panels = figures[0].axes
    assert [len(axis.lines) for axis in panels] == [3, 9, 3]
    assert [axis.get_title().split(":")[0] for axis in panels] == ["updates of the levels", "learning", "learning"]
    assert list(panels[2].lines[1].get_ydata()) == [2, 3, 4]
    assert [text.get_text() for text in panels[0].get_legend().get_texts()] == ["level 0", "level 1", "level 2"]
    assert panels[1].get_legend() is None and all(axis.get_ylabel() for axis in panels)


def test_a_run_of_one_row_shows_its_points(run, monkeypatch):
    file = run / "metrics.jsonl"
    file.write_text(file.read_text().splitlines()[0] + "\n")
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *arguments, **options: figures.append(figure))
    assert plot.main([str(run), "--memory"]) == 0
    assert {line.get_marker() for axis in figures[0].axes for line in axis.lines} == {"o"}


def test_memory_png_is_written(run):
    assert plot.main([str(run), "--memory"]) == 0
    assert (run / "memory.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    "words, sentence",
    [
        (["{run}", "{run}", "--memory"], "--memory draws one run: name one folder."),
        (["{llama}", "--memory"], "has no rows of memories or levels: name a run of a HOPE."),
    ],
)
def test_what_cannot_be_drawn_is_refused(run, capsys, words, sentence):
    llama = run / "llama"
    llama.mkdir()
    (llama / "metrics.jsonl").write_text('{"step": 1, "tokens": 10, "train/loss": 3.0}\n')
    assert plot.main([word.format(run=run, llama=llama) for word in words]) == 2
    assert sentence in capsys.readouterr().err and not (llama / "memory.png").exists()


def test_without_matplotlib_it_says_what_to_install(run, monkeypatch):
    monkeypatch.setattr(results, "find_spec", lambda name: None)
    with pytest.warns(UserWarning, match="matplotlib is not installed"):
        assert plot.main([str(run), "--memory"]) == 1
