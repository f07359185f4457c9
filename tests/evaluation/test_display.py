"""Pictures of the evaluation."""

from matplotlib.figure import Figure

from hope_hf.evaluation.display import curves


def test_of_two_curves_that_coincide_both_are_seen(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *arguments, **options: figures.append(figure))
    points = [(3.0, 0.1), (2.0, None)]
    curves(tmp_path / "x.png", [256, 512], {"loss": {"first": points, "second": points}}, "tokens")
    (axes,) = figures[0].axes
    below, above = (container[0] for container in axes.containers)
    # Gaps in the upper line and a smaller marker on the ring of the lower one.
    assert (below.get_linestyle(), above.get_linestyle()) == ("-", "--")
    assert below.get_markersize() > above.get_markersize()
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["first", "second"]
