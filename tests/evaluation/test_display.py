"""Pictures and bars of the evaluation."""

import time

from matplotlib.figure import Figure

from hope_hf.evaluation import display


def test_curves_that_coincide_are_all_seen_under_the_models_name(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *arguments, **options: figures.append(figure))
    names = ["frozen", "reset", "window", "carried"]
    with display.titled("HOPE demo"):
        display.curves(tmp_path / "x.png", [256, 512], {"loss": dict.fromkeys(names, [(3.0, 0.1), (2.0, None)])}, "x")
    (figure,) = figures
    (axes,) = figure.axes
    lines = [container[0] for container in axes.containers]
    sizes = [line.get_markersize() for line in lines]
    # A ring around each one above, and gaps in a line that covers another.
    assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) == 4
    assert [line.get_linestyle() for line in lines] == ["-", "--", "-", "--"]
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == names and figure.get_suptitle() == "HOPE demo"
    assert axes.yaxis.get_major_formatter()(1e-5) == "0.00001"


def test_a_log_has_a_line_of_a_bar_every_so_often(monkeypatch, capsys):
    clock = iter(range(0, 1000, 6))
    monkeypatch.setattr(display, "show_progress", lambda: False)
    assert list(display.progress([1, 2, 3], "short")) == [1, 2, 3]
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    with display.progress(None, "passkey", 8) as bar:
        bar.start_t -= display.LOG_SECONDS
        for _ in range(8):
            bar.update()
    lines = capsys.readouterr().err.splitlines()
    assert 1 <= len(lines) < 8 and all(line.startswith("passkey: ") and " of 8, " in line for line in lines)
