"""Mixture files: which corpora a run reads, how much of each, in which shares, and which documents pass.

corpora:
  web:
    dataset_name: HuggingFaceFW/fineweb-edu
    dataset_config_name: sample-10BT
    weight: 0.7
    max_tokens: 5_000_000_000
    min_length: 200
    deduplicate: true
  books:
    files: books/*.txt
    weight: 0.3
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from hashlib import blake2b
from itertools import islice

from hope_hf.common.files import at_home
from hope_hf.common.flags import LARGEST, as_list
from hope_hf.common.packaged import RECIPES, find_file
from hope_hf.common.parser import nearest
from hope_hf.common.recipe import read_yaml

# The most frequent words of each language, without words that two languages share.
_COMMON = {
    "de": "der die und das ist nicht ich sie den mit dem auf ein eine auch sich wie wird sind von zu",
    "en": "the of and to that was for with as his he it is are this be have which by from",
    "es": "el los las y que por una con para su como más pero lo este esta ser muy",
    "fr": "le les et des une dans qui pour pas sur au avec il est plus par je vous ce",
    "it": "il che di per non una sono della gli più come anche questo nel alla lo si",
    "nl": "de het een van en niet dat zijn voor met op te aan er ook maar naar wordt",
    "pt": "o os que não uma com para mais como mas ao das dos foi ele seu pela são",
}
LANGUAGES = tuple(_COMMON)
_WORDS = {language: frozenset(words.split()) for language, words in _COMMON.items()}
# Number of words read per document, and the share of common words that running text of a language has at least.
_MOST_WORDS = 2_000
_LEAST_SHARE = 0.08


BUILTIN = "builtin"
# Each names files, or a folder, or (`dataset_name`) a data set of the Hub.
_SOURCES = ("dataset_name", "files", "shards")
_OF_A_DATA_SET = ("dataset_config_name", "data_dir", "split", "streaming")
_OF_FILES = ("on_bad_rows",)
# Keys that do not apply to shards: these hold documents that passed, and are read whole.
_OF_DOCUMENTS = ("max_documents", "max_tokens", "min_length", "max_length", "deduplicate", "language", "text_column")
# Keys without a meaning for a kind of corpus.
_WITHOUT_MEANING = {
    "files": _OF_A_DATA_SET,
    "dataset_name": _OF_FILES,
    "shards": (*_OF_A_DATA_SET, *_OF_FILES, *_OF_DOCUMENTS),
    "the built-in corpus": (*_OF_A_DATA_SET, *_OF_FILES, "text_column"),
}
# More documents or tokens than any corpus has.
_MOST = 10**16


@dataclass(frozen=True)
class Corpus:
    """One corpus of a mixture: a data set, files or prepared shards."""

    name: str
    dataset_name: str | None = None
    """Hub name or folder; `builtin` is the built-in corpus."""
    dataset_config_name: str | None = None
    data_dir: str | None = None
    """Folder inside that data set, such as that of one language or topic."""
    split: str = "train"
    streaming: bool = False
    """Fetch only as much of that data set as its limit needs, in an order drawn by the seed."""
    files: list | str | None = None
    """Paths or glob patterns, see `hope_hf.data.files`."""
    on_bad_rows: str = "error"
    """Rows of files that cannot be parsed or hold no text: `error`, or `skip`."""
    shards: str | None = None
    """Folder that `hope-hf prepare` wrote."""
    text_column: str | None = None
    """Column of the text (default: `text`, or the only column of strings)."""
    weight: float | None = None
    """Share of the tokens, relative to the others' weights. Without weights a corpus counts by its size."""
    max_documents: int | None = None
    """Number of training documents to read, drawn by the seed."""
    max_tokens: int | None = None
    """Number of tokens to read, from training documents in an order drawn by the seed."""
    min_length: int | None = None
    """In characters."""
    max_length: int | None = None
    deduplicate: bool = False
    """Keep one of several documents with equal texts: the first."""
    language: str | None = None
    """One of `LANGUAGES`: keep documents that seem to be in it, by the share of its most common words."""

    def facts(self) -> dict:
        """The keys that differ from their defaults, JSON-able."""
        facts = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if value != field.default:
                facts[field.name] = value
        return facts


@dataclass(frozen=True)
class Kind:
    """The values that a field of a file may have."""

    words: str
    admits: Callable[[object], bool]


def read_mixture(path: str, flag: str = "The mixture") -> list[Corpus]:
    """The corpora of a mixture file, in its order.

    Raises ValueError that names the file with `flag`, the corpus and the fix.
    """
    source = f"{flag} {path}"
    document = read_yaml(find_file(path, RECIPES), source)
    corpora = document.get("corpora") if isinstance(document, dict) and len(document) == 1 else None
    if not isinstance(corpora, dict) or not corpora:
        raise ValueError(f"{source} must hold the one key 'corpora', with a name and settings for each.")
    mixture = []
    weights = {}
    for name, settings in corpora.items():
        corpus = _corpus(source, name, settings)
        mixture.append(corpus)
        weights[name] = corpus.weight
    try:
        check_weights(weights, source)
    except ValueError as error:
        raise ValueError(f"{error}: give one above 0 to all corpora, or none.") from None
    return [corpus for corpus in mixture if corpus.weight != 0]


def is_corpus_name(name: object) -> bool:
    """Whether a corpus may have this name; shards lie in folders of these names."""
    return isinstance(name, str) and re.fullmatch("[A-Za-z0-9_-]*[A-Za-z0-9][A-Za-z0-9_-]*", name) is not None


def is_weight(value: object) -> bool:
    """Whether it is 0 or a number whose sums and quotients with other weights are finite."""
    return type(value) in (int, float) and (value == 0 or 1e-9 <= value <= LARGEST)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value != ""


# By the type of a field of `Corpus`. type(): a bool is an int.
_KINDS = {
    str: Kind("a text", _is_text),
    str | None: Kind("a text", _is_text),
    list | str | None: Kind(
        "a text or a list of texts", lambda value: value != [] and all(map(_is_text, as_list(value)))
    ),
    float | None: Kind("0 or a number from 1e-9 to 1e9", is_weight),
    int | None: Kind("a whole number from 1 to 1e16", lambda value: type(value) is int and 1 <= value <= _MOST),
    bool: Kind("true or false", lambda value: isinstance(value, bool)),
}


def check_weights(weights: dict[str, float | None], source: str) -> None:
    """Raise ValueError if some corpora have a weight and some none, or if all weights are 0."""
    without = [name for name, weight in weights.items() if weight is None]
    if without and len(without) < len(weights):
        raise ValueError(f"{source} gives no weight to {', '.join(without)}")
    if not without and not any(weights.values()):
        raise ValueError(f"{source} gives every corpus the weight 0")


def _corpus(source: str, name: object, settings: object) -> Corpus:
    where = f"{source}, corpus {name if is_corpus_name(name) else repr(name)},"
    if not is_corpus_name(name):
        quotes = "" if isinstance(name, str) else ", in quotes"
        raise ValueError(f"{where} needs a name of letters, digits, - and _{quotes}.")
    if not isinstance(settings, dict):
        raise ValueError(f"{where} must hold lines of the form 'key: value'.")
    types = {field.name: field.type for field in fields(Corpus)}
    del types["name"]
    for key, value in settings.items():
        if key not in types:
            raise ValueError(f"{where} has an unknown key {key!r}{nearest(str(key), types)}")
        value = _number(value, types[key])
        if not _KINDS[types[key]].admits(value):
            raise ValueError(f"{where} has {key}: {value!r}, give {_KINDS[types[key]].words}.")
        if key in _SOURCES and value:
            value = list(map(at_home, value)) if isinstance(value, list) else at_home(value)
        settings[key] = value
    corpus = Corpus(name, **settings)
    named = [key for key in _SOURCES if settings.get(key)]
    if len(named) != 1:
        raise ValueError(f"{where} names {' and '.join(named) or 'no text'}: give one of {', '.join(_SOURCES)}.")
    if corpus.language is not None and corpus.language not in LANGUAGES:
        raise ValueError(f"{where} has language: {corpus.language}, give one of {', '.join(LANGUAGES)}.")
    if corpus.on_bad_rows not in ("error", "skip"):
        raise ValueError(f"{where} has on_bad_rows: {corpus.on_bad_rows}, give error or skip.")
    kind = "the built-in corpus" if corpus.dataset_name == BUILTIN else named[0]
    for key in _WITHOUT_MEANING.get(kind, ()):
        if key in settings:
            raise ValueError(f"{where} has {key}, which has no meaning for {kind}: leave it out.")
    if corpus.streaming and corpus.max_documents is None and corpus.max_tokens is None:
        raise ValueError(f"{where} has streaming and no limit: give max_tokens or max_documents, or leave it out.")
    return corpus


def _number(value: object, kind: object) -> object:
    """A text such as 5e9 as a number, where a number is expected: YAML 1.1 reads it as a text."""
    if kind not in (int | None, float | None) or not isinstance(value, str | float):
        return value
    try:
        number = float(value)
    except ValueError:
        return value
    return int(number) if kind == int | None and number.is_integer() else number


def keep(texts: Iterable[str | None], corpus: Corpus) -> tuple[list[int], Counter]:
    """Indices of the documents that pass the corpus's filters, and how many were dropped by each filter."""
    kept = []
    dropped = Counter()
    judge = Judge(corpus)
    for index, text in enumerate(texts):
        reason = judge.reason(text)
        if reason is None:
            kept.append(index)
        else:
            dropped[reason] += 1
    return kept, dropped


def seems_to_be(text: str, language: str) -> bool:
    """Whether no language has more of its common words in the text, and these are enough for running text."""
    words = Counter(match[0].lower() for match in islice(re.finditer(r"[^\W\d_]+", text), _MOST_WORDS))
    count = _common_words(words, language)
    most = max(_common_words(words, other) for other in LANGUAGES)
    return count > 0 and count == most and count >= _LEAST_SHARE * words.total()


def _common_words(words: Counter, language: str) -> int:
    return sum(words[word] for word in _WORDS[language])


class Judge:
    """Decides for one document after another whether it passes the filters of a corpus."""

    def __init__(self, corpus: Corpus):
        self._corpus = corpus
        self._seen: set[bytes] = set()

    def reason(self, text: str | None) -> str | None:
        """Why the next document is dropped; None if it passes."""
        corpus = self._corpus
        if not text or text.isspace():
            return "blank"
        if corpus.min_length is not None and len(text) < corpus.min_length:
            return "min_length"
        if corpus.max_length is not None and len(text) > corpus.max_length:
            return "max_length"
        if corpus.language is not None and not seems_to_be(text, corpus.language):
            return "language"
        if corpus.deduplicate:
            digest = blake2b(text.encode("utf-8", errors="surrogatepass"), digest_size=16).digest()
            if digest in self._seen:
                return "deduplicate"
            self._seen.add(digest)
        return None
