"""The beginning of a data set's stream, as much as the limit of a corpus needs, kept in the cache of `datasets`."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import pyarrow as pa
from datasets import Dataset, IterableDataset
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from .cache import cache_path, cached_texts
from .encoding import make_encoder
from .files import read_stream, text_column
from .filters import Judge
from .mixture import Corpus
from .packing import stable_seed
from .sources import load_data_set
from .split import held_out
from .vocabulary import tokenizer_hash

# Bytes of text per token, of most tokenizers at most.
BYTES_PER_TOKEN = 5
# Documents among which the order is drawn; that of the data set's files is drawn, too.
_SHUFFLED = 1_000
_READ_TOGETHER = 100
# All documents are tokenized up to so many, and one in `_SAMPLED` of the others; the estimate may err by the surplus.
_TOKENIZED, _SAMPLED, _SURPLUS = 1_000, 16, 1.02


@dataclass(frozen=True)
class Needed:
    """A stream is read until it has given all of this, in documents that pass the corpus's filters.

    It ends with `most_documents` of them in any case.
    """

    seed: int | None = None
    """Draws the order; None: that of the data set."""
    percentage: float = 0.0
    """Of documents that are held out."""
    documents: int | None = None
    """Training documents."""
    tokens: int | None = None
    """Training tokens."""
    size: int | None = None
    """Bytes of training documents."""
    held: int = 0
    """Documents that are held out."""
    most_documents: int | None = None


def fetch(corpus: Corpus, needed: Needed, tokenizer: PreTrainedTokenizerBase | None, source: str) -> Dataset:
    """The documents that are read, also those that do not pass. tokenizer: counts tokens, where they are needed.

    Raises ValueError that names `source`.
    """
    files, what = _identity(corpus, needed, tokenizer)
    return cached_texts(files, what, _read(corpus, needed, tokenizer, source))


def missing_bytes(corpus: Corpus, needed: Needed, tokenizer: PreTrainedTokenizerBase) -> int:
    """About how many bytes `fetch` will write into the cache, as far as the corpus's limit tells."""
    fetched = cache_path(*_identity(corpus, needed, tokenizer)).exists()
    return 0 if fetched else BYTES_PER_TOKEN * (corpus.max_tokens or 0)


def _identity(corpus: Corpus, needed: Needed, tokenizer: PreTrainedTokenizerBase | None) -> tuple[list[str], tuple]:
    folder = Path(corpus.dataset_name)
    files = [str(path) for path in sorted(folder.rglob("*")) if path.is_file()] if folder.is_dir() else []
    counted_by = tokenizer_hash(tokenizer) if needed.tokens is not None else None
    return files, (replace(corpus, weight=None), needed, counted_by)


def _read(corpus: Corpus, needed: Needed, tokenizer, source: str) -> Iterator[pa.Array]:
    stream: IterableDataset = load_data_set(
        f"{source} (split {corpus.split})",
        corpus.dataset_name,
        corpus.dataset_config_name,
        split=corpus.split,
        data_dir=corpus.data_dir,
        streaming=True,
    )
    stream = text_column(stream, source, corpus.text_column)
    if needed.seed is not None:
        # By name, too: two corpora of one data set must not be drawn alike.
        seed = stable_seed(needed.seed, *corpus.name.encode()) % 2**32
        stream = stream.shuffle(seed=seed, buffer_size=_SHUFFLED)
    count = _Count(corpus, needed, tokenizer)
    rows = read_stream(stream, source)
    with tqdm(unit="B", unit_scale=True, desc=f"Fetching {corpus.name}", disable=None) as bar:
        while not count.is_enough and (texts := [row["text"] for row in islice(rows, _READ_TOGETHER)]):
            texts = list(count.until_enough(texts))
            bar.update(sum(len(text or "") for text in texts))
            yield pa.array(texts, pa.string())


class _Count:
    """What the documents that were read amount to."""

    def __init__(self, corpus: Corpus, needed: Needed, tokenizer: PreTrainedTokenizerBase | None):
        self._needed, self._encode = needed, make_encoder(tokenizer) if needed.tokens is not None else None
        self._judge = Judge(corpus.filters)
        self._documents = self._held = self._size = self._sampled_size = self._sampled_tokens = 0

    @property
    def is_enough(self) -> bool:
        """Whether there is all that is needed."""
        needed = self._needed
        if self._documents == needed.most_documents:
            return True
        tokens = self._sampled_tokens * self._size / max(1, self._sampled_size)
        return (
            self._held >= needed.held
            and self._documents >= (needed.documents or 0)
            and self._size >= (needed.size or 0)
            and tokens >= _SURPLUS * (needed.tokens or 0)
        )

    def until_enough(self, texts: list[str | None]) -> Iterator[str | None]:
        """The texts up to the one that is enough."""
        for text in texts:
            yield text
            self._add(text)
            if self.is_enough:
                return

    def _add(self, text: str | None) -> None:
        if self._judge.reason(text) is not None:
            return
        if held_out(text, self._needed.percentage):
            self._held += 1
            return
        size = len(text.encode("utf-8", errors="surrogatepass"))
        self._size += size
        if self._encode and (self._documents < _TOKENIZED or self._documents % _SAMPLED == 0):
            self._sampled_size += size
            self._sampled_tokens += sum(map(len, self._encode([text])))
        self._documents += 1
