"""Mixture files: one sentence for each mistake, with the file, the corpus and the fix; which documents pass."""

import os
from pathlib import Path

import pytest

from hope_hf import PRESETS
from hope_hf.data.mixture import LANGUAGES, Corpus, keep, read_mixture, seems_to_be


def write(tmp_path, text):
    path = tmp_path / "mix.yaml"
    path.write_text(text)
    return str(path)


def test_corpora_come_in_their_order_without_those_of_weight_0(tmp_path):
    path = write(
        tmp_path,
        "corpora:\n  b: {files: b.txt, weight: 2, max_tokens: 5_000}\n  a: {dataset_name: a/b, weight: 0.5}\n"
        "  c: {shards: s, weight: 0}\n",
    )
    first, second = read_mixture(path)
    assert (first.name, first.files, first.weight, first.max_tokens) == ("b", "b.txt", 2, 5000)
    assert (second.name, second.dataset_name, second.split, second.weight) == ("a", "a/b", "train", 0.5)
    assert second.facts() == {"name": "a", "dataset_name": "a/b", "weight": 0.5}


def test_a_tilde_is_the_users_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    path = write(tmp_path, "corpora:\n  a: {files: [~/a.txt, b]}\n  b: {shards: ~/b}\n  c: {dataset_name: ~/c}\n")
    files, shards, data_set = read_mixture(path)
    assert files.files == ["/home/me/a.txt", "b"]
    assert (shards.shards, data_set.dataset_name) == ("/home/me/b", "/home/me/c")


@pytest.mark.parametrize(
    "text, sentence",
    [
        ("corpora: [", "cannot be read: "),
        ("- a", "must hold the one key 'corpora'"),
        ("corpora: {}", "must hold the one key 'corpora'"),
        ("corpora: {a: {files: a.txt}}\nseed: 1", "must hold the one key 'corpora'"),
        ("corpora: {'a/b': {files: a.txt}}", "corpus 'a/b', needs a name of letters, digits, - and _."),
        ("corpora: {a: a.txt}", "corpus a, must hold lines of the form 'key: value'."),
        ("corpora: {a: {file: a.txt}}", "corpus a, has an unknown key 'file'; did you mean files?"),
        ("corpora: {a: {weight: 1}}", "corpus a, names no text: give one of dataset_name, files, shards."),
        ("corpora: {a: {files: a, shards: b}}", "corpus a, names files and shards: give one of"),
        ("corpora: {a: {files: a, weight: -1}}", "corpus a, has weight: -1, give 0 or a number from 1e-9 to 1e9."),
        ("corpora: {a: {files: a, weight: .nan}}", "corpus a, has weight: nan, give 0 or a number from 1e-9 to 1e9."),
        ("corpora: {a: {files: a, weight: 1.7e+308}}", "has weight: 1.7e+308, give 0 or a number from 1e-9 to 1e9."),
        ("corpora: {a: {files: a, max_tokens: 0}}", "has max_tokens: 0, give a whole number from 1 to 1e16."),
        ("corpora: {a: {files: a, max_tokens: 5.5}}", "has max_tokens: 5.5, give a whole number from 1 to 1e16."),
        ("corpora: {a: {files: a, max_tokens: 5e99}}", ", give a whole number from 1 to 1e16."),
        ("corpora: {a: {files: a, max_tokens: 1e999}}", "has max_tokens: inf, give a whole number from 1 to 1e16."),
        ("corpora: {a: {files: a, max_documents: many}}", "has max_documents: 'many', give a whole number from 1"),
        ("corpora: {a: {files: a, split: train}}", "has split, which has no meaning for files: leave it out."),
        ("corpora: {a: {files: a, data_dir: b}}", "has data_dir, which has no meaning for files: leave it out."),
        (
            "corpora: {a: {files: a, dataset_config_name: b}}",
            "has dataset_config_name, which has no meaning for",
        ),
        ("corpora: {a: {shards: a, split: b}}", "has split, which has no meaning for shards: leave it out."),
        ("corpora: {a: {dataset_name: builtin, split: b}}", "has split, which has no meaning for the built-in corpus"),
        ("[a]: 1", "cannot be read: a key is a list or a mapping"),
        ("corpora: " + "[" * 100_000, "cannot be read: it is nested too deep"),
        ("corpora: {a: {files: a, deduplicate: 1}}", "has deduplicate: 1, give true or false."),
        ("corpora: {a: {files: a, language: xx}}", "has language: xx, give one of de, en, es, fr, it, nl, pt."),
        ("corpora: {a: {shards: a, min_length: 3}}", "has min_length, which has no meaning for shards: leave"),
        ("corpora: {a: {files: a, weight: 1}, b: {files: b}}", "gives no weight to b: give one above 0 to all"),
        ("corpora: {a: {files: a, weight: 0}, b: {files: b, weight: 0}}", "gives every corpus the weight 0: give"),
    ],
)
def test_a_mistake_is_named(tmp_path, text, sentence):
    path = write(tmp_path, text)
    with pytest.raises(ValueError) as raised:
        read_mixture(path)
    assert f"The mixture {path}" in str(raised.value) and sentence in str(raised.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"The mixture .*mix.yaml cannot be read: No such file or directory\."):
        read_mixture(str(tmp_path / "mix.yaml"))
    os.mkfifo(tmp_path / "mix.yaml")
    with pytest.raises(ValueError, match=r"The mixture .*mix.yaml cannot be read: it is not a regular file\."):
        read_mixture(str(tmp_path / "mix.yaml"))


@pytest.mark.parametrize("written", ["4_000_000_000", "4e9", "4.0e+9", "'4e9'"])
def test_a_number_may_be_written_in_every_way(tmp_path, written):
    (corpus,) = read_mixture(write(tmp_path, f"corpora: {{a: {{files: a.txt, max_tokens: {written}, weight: 2e-1}}}}"))
    assert (corpus.max_tokens, type(corpus.max_tokens), corpus.weight) == (4_000_000_000, int, 0.2)


def test_every_preset_has_a_mixture_that_is_read_about_once():
    folder = Path(__file__).parents[2] / "recipes" / "mixtures"
    sizes = {name.removesuffix("-hybrid") for name in PRESETS}
    assert {path.stem for path in folder.glob("*.yaml")} == sizes
    for preset, tokens in (("pilot", 5e9), ("mid", 30e9), ("target", 100e9)):
        corpora = read_mixture(str(folder / f"{preset}.yaml"))
        weights = sum(corpus.weight for corpus in corpora)
        for corpus in corpora:
            assert tokens * corpus.weight / weights <= corpus.max_tokens <= 1.1 * tokens * corpus.weight / weights


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
    kept, dropped = keep(texts, Corpus("a", min_length=10, max_length=50, deduplicate=True))
    assert kept == [0, 6]
    assert dropped == {"min_length": 1, "deduplicate": 1, "blank": 2, "max_length": 1}


def test_without_conditions_only_blank_documents_are_dropped():
    assert keep(["a", "a", "", "b"], Corpus("a")) == ([0, 1, 3], {"blank": 1})


def test_lengths_count_characters_and_include_their_bounds():
    assert keep(["é" * 4, "é" * 5, "é" * 6], Corpus("a", min_length=5, max_length=5))[0] == [1]


@pytest.mark.parametrize("language", LANGUAGES)
def test_running_text_is_of_its_own_language_alone(language):
    assert [name for name in LANGUAGES if seems_to_be(TEXTS[name], language)] == [language]


@pytest.mark.parametrize("text", ["def f(x): return x + 1", "12 34 56", "zxcv qwer asdf"])
def test_what_is_no_running_text_is_of_no_language(text):
    assert not any(seems_to_be(text, language) for language in LANGUAGES)
