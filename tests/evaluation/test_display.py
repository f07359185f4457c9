"""Pictures of the evaluation."""

from matplotlib.figure import Figure

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
    # A ring around each one above, and gaps in a line that lies on another.
    assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) == 4
    assert all(line.get_markerfacecolor() == "none" for line in lines)
    assert [line.get_linestyle() for line in lines] == ["-", "--", "-", "--"]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == names
