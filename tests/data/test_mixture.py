"""Mixture files: one sentence for each mistake, with the file, the corpus and the fix; which documents pass."""


import pytest

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


# The settings of corpus `a`, or a whole file, and words of the error.
MISTAKES = [
    ("corpora: [", "cannot be read"),
    ("- a", "'corpora'"),
    ("corpora: {a: {files: a.txt}}\nseed: 1", "'corpora'"),
    ("corpora: {'a/b': {files: a.txt}}", "corpus 'a/b'"),
    ("corpora: {a: a.txt}", "corpus a, "),
    ("corpora: " + "[" * 5_000, "nested too deep"),
    ("corpora: {a: {files: a, weight: 1}, b: {files: b}}", "no weight to b"),
    ("corpora: {a: {files: a, weight: 0}, b: {files: b, weight: 0}}", "weight 0"),
    ("file: a.txt", "did you mean files?"),
    ("weight: 1", "no text"),
    ("files: a, shards: b", "files and shards"),
    ("files: a, weight: -1", "weight: -1"),
    ("files: a, weight: .nan", "weight: nan"),
    ("files: a, weight: 1.7e+308", "weight: 1.7e+308"),
    ("files: a, max_tokens: 0", "max_tokens: 0"),
    ("files: a, max_tokens: 5.5", "max_tokens: 5.5"),
    ("files: a, max_tokens: 1e999", "max_tokens: inf"),
    ("files: a, max_tokens: 0100", "write 0100 as a decimal number"),
    ("files: a, max_tokens: 1:30", "write 1:30 as a decimal number"),
    ("files: a, weight: 1:30.5", "write 1:30.5 as a decimal number"),
    ("files: a, max_documents: many", "max_documents: 'many'"),
    ("files: a, split: train", "split, "),
    ("shards: a, min_length: 3", "min_length, "),
    ("dataset_name: builtin, split: b", "split, "),
    ("files: a, deduplicate: 1", "deduplicate: 1"),
    ("files: a, language: xx", "language: xx"),
]


@pytest.mark.parametrize("text, words", MISTAKES)
def test_a_mistake_is_named(tmp_path, text, words):
    path = write(tmp_path, text if text.startswith(("corpora", "-")) else f"corpora: {{a: {{{text}}}}}")
    with pytest.raises(ValueError) as raised:
        read_mixture(path)
    assert f"The mixture {path}" in str(raised.value) and words in str(raised.value)


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
    assert keep(["a", "a", "", "b"], Corpus("a")) == ([0, 1, 3], {"blank": 1})
    # In characters, bounds included.
    assert keep(["é" * 4, "é" * 5, "é" * 6], Corpus("a", min_length=5, max_length=5))[0] == [1]


@pytest.mark.parametrize("language", LANGUAGES)
def test_running_text_is_of_its_own_language_alone(language):
    assert [name for name in LANGUAGES if seems_to_be(TEXTS[name], language)] == [language]


@pytest.mark.parametrize("text", ["def f(x): return x + 1", "12 34 56", "zxcv qwer asdf"])
def test_what_is_no_running_text_is_of_no_language(text):
    assert not any(seems_to_be(text, language) for language in LANGUAGES)
