"""The examples in the docstrings of public classes run and print the output shown."""

import doctest
import inspect

import pytest

import hope_hf

CLASSES = [name for name in hope_hf.__all__ if name not in ("CACHE_NAME", "PRESETS", "HopePreTrainedModel")]


@pytest.mark.parametrize("name", CLASSES)
def test_the_example_of_a_public_class_runs(name):
    # Fences end what is printed; no names but what the example imports, as in a fresh session.
    text = inspect.getdoc(getattr(hope_hf, name)).replace("```", "")
    example = doctest.DocTestParser().get_doctest(text, {}, name, None, 0)
    assert len(example.examples) > 1, f"{name} has no example"
    failures, _ = doctest.DocTestRunner().run(example)
    assert not failures
