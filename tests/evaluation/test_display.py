"""Pictures of the evaluation."""

import time

from matplotlib.figure import Figure

from hope_hf.evaluation import display
from hope_hf.evaluation.display import curves


def test_curves_that_coincide_are_all_seen(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *arguments, **options: figures.append(figure))
    names = ["frozen", "reset", "window", "carried"]
    points = [(3.0, 0.1), (2.0, None)]
    curves(tmp_path / "x.png", [256, 512], {"loss": dict.fromkeys(names, points)}, "tokens")
    (axes,) = figures[0].axes
    lines = [container[0] for container in axes.containers]
    sizes = [line.get_markersize() for line in lines]
    # A ring around each one above, and gaps in a line that covers another.
    assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) == 4
    assert all(line.get_markerfacecolor() == "none" for line in lines)
    assert [line.get_linestyle() for line in lines] == ["-", "--", "-", "--"]
    (legend,) = figures[0].legends
    assert [text.get_text() for text in legend.get_texts()] == names and axes.get_ylabel() == "loss"


def test_a_picture_has_the_name_of_the_model_and_plain_numbers(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *arguments, **options: figures.append(figure))
    panels = {name: {"a": [(1.0, None)], "b": [(2e-5, None)]} for name in ("loss", "gain")}
    with display.titled("HOPE demo"):
        curves(tmp_path / "x.png", [256], panels, "tokens")
    curves(tmp_path / "x.png", [256], panels, "tokens")
    assert [figure.get_suptitle() for figure in figures] == ["HOPE demo", ""]
    # One legend for both panels.
    assert [len(figure.legends) for figure in figures] == [1, 1]
    assert figures[0].axes[0].yaxis.get_major_formatter()(1e-5) == "0.00001"


def test_a_log_has_a_line_of_a_bar_every_so_often(monkeypatch, capsys):
    clock = iter(range(0, 1000, 6))
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(display, "show_progress", lambda: False)
    with display.progress(None, "passkey", 8) as bar:
        bar.start_t -= display.LOG_SECONDS
        for _ in range(8):
            bar.update()
    lines = capsys.readouterr().err.splitlines()
    assert 1 <= len(lines) < 8 and all(line.startswith("passkey: ") and " of 8, " in line for line in lines)


def test_a_short_unit_leaves_nothing_in_a_log(monkeypatch, capsys):
    monkeypatch.setattr(display, "show_progress", lambda: False)
    assert list(display.progress([1, 2, 3], "passkey")) == [1, 2, 3]
    assert capsys.readouterr().err == ""
