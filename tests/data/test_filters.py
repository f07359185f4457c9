"""Filters of documents: what is kept, and the reason for every other one."""

import pytest

from hope_hf.data.mixture import LANGUAGES, Filters, keep, seems_to_be

TEXTS = {
    "en": "The house that he built for his family is by the river, and it was the first of the kind.",
    "de": "Das Haus ist nicht weit von der Stadt, und die Leute sind auch mit dem Wagen auf dem Weg.",
    "fr": "Le chat est dans la maison avec les enfants, et il ne veut pas sortir par la porte.",
    "es": "El perro y los gatos son de una casa que está por las montañas, pero no es muy grande.",
    "it": "Il libro che non ho letto è della scuola, ma gli altri sono per una lezione di storia.",
    "nl": "Het huis van de buren is niet groot, maar er zijn ook een tuin en een schuur voor de fiets.",
    "pt": "O livro não é meu, mas os outros são para uma aula com ele, e foi pela manhã que ao das.",
}


def test_every_condition_counts_what_it_drops():
    texts = ["long enough to stay", "short", "long enough to stay", None, " \n", "x" * 90, "another one that stays"]
    kept, dropped = keep(texts, Filters(min_length=10, max_length=50, deduplicate=True))
    assert kept == [0, 6]
    assert dropped == {"min_length": 1, "deduplicate": 1, "blank": 2, "max_length": 1}


def test_without_conditions_only_blank_documents_are_dropped():
    assert keep(["a", "a", "", "b"], Filters()) == ([0, 1, 3], {"blank": 1})


def test_lengths_count_characters_and_include_their_bounds():
    assert keep(["é" * 4, "é" * 5, "é" * 6], Filters(min_length=5, max_length=5))[0] == [1]


@pytest.mark.parametrize("language", LANGUAGES)
def test_running_text_is_of_its_own_language_alone(language):
    assert [name for name in LANGUAGES if seems_to_be(TEXTS[name], language)] == [language]


@pytest.mark.parametrize("text", ["def f(x): return x + 1", "12 34 56", "zxcv qwer asdf"])
def test_what_is_no_running_text_is_of_no_language(text):
    assert not any(seems_to_be(text, language) for language in LANGUAGES)
