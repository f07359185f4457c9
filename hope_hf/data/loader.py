"""Endless batches of training data, each with the state that continues after it.

Both loaders yield `(batch, state)`: a batch as described in `hope_hf.data.packing`, and a small JSON-able dict that
describes this rank after the batch. A loader given the state continues with the next batch, whatever was read ahead
when it was saved.

Global order: rank r of W takes rows r, r+W, r+2W, ... of the row sequence, so together the ranks read the rows that
one process with W times the rows per batch would read, each once.
"""

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from datasets import IterableDataset
from datasets.distributed import split_dataset_by_node
from torch import Tensor

from .files import read_stream
from .order import Carried, Mixed, Shuffled
from .packing import Block, collate, stable_seed

Batch = tuple[dict[str, Tensor], dict]

_DOCUMENTS_ENCODED_TOGETHER = 64
_CHARACTERS_OF_BUFFER = 1 << 26


@dataclass(frozen=True)
class Layout:
    """The batches of one rank among all."""

    block_size: int
    batch_size: int
    """Rows per rank."""
    rank: int
    world_size: int
    carry: bool
    """Row b of a batch continues row b of the batch before."""

    @property
    def global_rows(self) -> int:
        """Rows of one batch over all ranks."""
        return self.batch_size * self.world_size


class BlockLoader:
    """Batches from blocks with random access, in the order of `hope_hf.data.order` that suits the layout.

    `order`: that of the blocks (with carry it is `Carried`). `positions`: whether they restart with documents.

    State: {"rows": rows read by all ranks together} and, for carry, {"streams": rows per global batch}.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        order: Shuffled | Mixed,
        layout: Layout,
        positions: bool,
        state: dict | None = None,
    ):
        self.blocks, self.layout, self.positions = blocks, layout, positions
        self.order = Carried(len(blocks), layout.global_rows) if layout.carry else order
        # Rows that are carried from batch to batch.
        self._streams = {"streams": layout.global_rows} if layout.carry else {}
        self._rows = 0 if state is None else state["rows"]
        if state is not None:
            saved = {name: number for name, number in state.items() if name != "rows"}
            if saved != self._streams:
                raise ValueError(
                    f"The checkpoint carries {saved.get('streams', 'no')} rows from batch to batch and this run "
                    f"{self._streams.get('streams', 'none')}: keep --document_boundary, "
                    "--per_device_train_batch_size and the number of processes."
                )

    @property
    def batches_per_epoch(self) -> int:
        """Batches of this rank that read every block about once."""
        return max(1, len(self.order) // self.layout.global_rows)

    def __iter__(self) -> Iterator[Batch]:
        layout = self.layout
        while True:
            first = self._rows + layout.rank
            stop = self._rows + layout.global_rows
            rows = range(first, stop, layout.world_size)
            blocks = [self.blocks[self.order(row)] for row in rows]
            self._rows += layout.global_rows
            batch = collate(blocks, layout.block_size, padding=0, restart=self.positions)
            yield batch, {"rows": self._rows, **self._streams}


@dataclass(frozen=True)
class Shuffle:
    """The order of a stream: every `buffer_size` documents are shuffled among themselves; 1 keeps the stream's order.

    A buffer ends earlier if its text would fill too much memory. The next pass of the stream is shuffled differently.
    """

    buffer_size: int
    seed: int

    def __call__(self, texts: list[str], share: tuple[int, int], number: int) -> list[str]:
        """The texts of the buffer with this number, counted over all passes of the stream."""
        if self.buffer_size == 1:
            return texts
        generator = torch.Generator().manual_seed(stable_seed(self.seed, *share, number))
        return [texts[index] for index in torch.randperm(len(texts), generator=generator).tolist()]


class StreamLoader:
    """Batches from a stream of documents, shuffled a buffer at a time, tokenized while reading.

    reset: rank r packs documents r, r+W, ... into consecutive rows.
    carry: every row of every rank packs its own documents (row b of S in the global batch takes b, b+S, ...), so
    row b of one batch continues row b of the batch before.

    `source` names the documents in errors. State: {"packers": [one state per contiguous stream of this rank]}, see
    `_Packer.state`.
    """

    batches_per_epoch = None

    def __init__(
        self,
        documents: IterableDataset,
        encode: Callable,
        layout: Layout,
        shuffle: Shuffle,
        state: dict | None = None,
        source: str = "The stream",
    ):
        self.layout = layout
        self._packers = []
        # With carry every row has a packer, else all rows of the rank have one.
        for row in range(layout.batch_size if layout.carry else 1):
            if layout.carry:
                share = (layout.rank + row * layout.world_size, layout.global_rows)
            else:
                share = (layout.rank, layout.world_size)
            part = split_dataset_by_node(documents, *share)
            self._packers.append(_Packer(part, encode, layout.block_size, share, shuffle, source))
        if state is not None:
            self._restore(state["packers"])

    def _restore(self, states: list[dict]) -> None:
        shares = [list(packer.share) for packer in self._packers]
        if shares != [state["share"] for state in states]:
            raise ValueError(
                "The checkpoint's stream was divided in another way: keep --document_boundary, the number of "
                "processes and, with carry, --per_device_train_batch_size."
            )
        for packer, state in zip(self._packers, states, strict=True):
            packer.restore(state)

    def __iter__(self) -> Iterator[Batch]:
        layout = self.layout
        while True:
            rows = []
            for row in range(layout.batch_size):
                packer = self._packers[row % len(self._packers)]
                rows.append(packer.next_block())
            batch = collate(rows, layout.block_size, padding=0, restart=not layout.carry)
            yield batch, {"packers": [packer.state() for packer in self._packers]}


class _Packer:
    """One contiguous stream of tokens from a share of the documents, endless."""

    def __init__(
        self,
        documents: IterableDataset,
        encode: Callable,
        block_size: int,
        share: tuple[int, int],
        shuffle: Shuffle,
        source: str,
    ):
        self.documents = documents
        self.encode = encode
        self.block_size = block_size
        self.share = share
        self.shuffle = shuffle
        self.source = source
        self._beginning = documents.state_dict()
        # The stream's state before the buffer was filled: on resuming, the buffer's documents are read, shuffled and
        # encoded again, which keeps the state small however long they are.
        self._before = self._after = self._beginning
        self._texts: list[str] = []
        self._buffers = 0
        # Index in the buffer of the first text that is encoded.
        self._first = 0
        self._encoded: list[list[int]] = []
        # The place of the next token: a document among those encoded, and a token of it.
        self._document = 0
        self._offset = 0
        self._open(self._beginning)

    def restore(self, state: dict) -> None:
        """Continue after a state. Raises ValueError if the documents are not those that it was taken from."""
        self._open(state["before"])
        self._buffers = state["buffer"]
        self._fill()
        self._encode(state["first"])
        self._document = state["document"]
        self._offset = state["offset"]
        # At the end of what is encoded, the next token is that of the next document.
        lengths = [*map(len, self._encoded), 1]
        if self._document >= len(lengths) or self._offset >= lengths[self._document]:
            raise ValueError(
                "--streaming: the documents are not those that the checkpoint was reading: give the same data and "
                "tokenizer, or begin in another --output_dir."
            )

    def state(self) -> dict:
        """JSON-able: which buffer and which of its texts were read last, and the place of the next token in them."""
        return {
            "share": list(self.share),
            "before": self._before,
            "buffer": self._buffers - 1,
            "first": self._first,
            "document": self._document,
            "offset": self._offset,
        }

    def next_block(self) -> Block:
        """The next tokens of the stream."""
        tokens = []
        starts = []
        while len(tokens) < self.block_size:
            if self._document == len(self._encoded):
                self._read()
            document = self._encoded[self._document]
            if self._offset == 0:
                starts.append(len(tokens))
            part = document[self._offset : self._offset + self.block_size - len(tokens)]
            tokens += part
            self._offset += len(part)
            if self._offset == len(document):
                self._document += 1
                self._offset = 0
        return Block(torch.tensor(tokens), torch.tensor(starts, dtype=torch.int64))

    def _open(self, state: dict):
        self.documents.load_state_dict(state)
        self._iterator = read_stream(self.documents, self.source)
        # The data set reports the state of its beginning until a row is read, whatever state was loaded.
        self._after = state

    def _read(self):
        """Encode the next documents; after the last one start again from the first."""
        restarted = False
        self._encode(self._first + _DOCUMENTS_ENCODED_TOGETHER)
        while not self._encoded:
            if self._first >= len(self._texts):
                self._fill()
                self._encode(0)
            else:
                self._encode(self._first + _DOCUMENTS_ENCODED_TOGETHER)
            if not self._texts:
                if restarted:
                    raise ValueError(
                        f"--streaming: there is no document for share {self.share[0] + 1} of {self.share[1]}: use "
                        "fewer processes or rows per batch, or leave out --streaming."
                    )
                restarted = True
                self._open(self._beginning)

    def _encode(self, first: int):
        self._first = first
        self._document = 0
        self._offset = 0
        self._encoded = self.encode(self._texts[first : first + _DOCUMENTS_ENCODED_TOGETHER])

    def _fill(self):
        """Read the next buffer; empty at the end of the stream."""
        self._before = self._after
        # Without shuffling, the buffer needs no more documents than are encoded together.
        most = self.shuffle.buffer_size if self.shuffle.buffer_size > 1 else _DOCUMENTS_ENCODED_TOGETHER
        room = _CHARACTERS_OF_BUFFER
        texts = []
        for row in islice(self._iterator, most):
            texts.append(row["text"])
            room -= len(row["text"] or "")
            if room <= 0:
                break
        self._after = self.documents.state_dict()
        self._texts = self.shuffle(texts, self.share, self._buffers)
        self._buffers += 1


class Prefetched:
    """A loader whose batches are read ahead by one background thread and, if wanted, page-locked.

    A thread, not worker processes: encoding and copying release the interpreter lock, and the order is unchanged.
    """

    def __init__(self, loader: BlockLoader | StreamLoader, ahead: int, pin_memory: bool):
        self.loader = loader
        self.ahead = ahead
        self.pin_memory = pin_memory and torch.cuda.is_available()

    @property
    def batches_per_epoch(self) -> int | None:
        """`batches_per_epoch` of the loader inside."""
        return self.loader.batches_per_epoch

    def __iter__(self) -> Iterator[Batch]:
        batches = iter(self.loader)
        if self.pin_memory:
            batches = map(_pinned, batches)
        return _read_ahead(batches, self.ahead) if self.ahead else batches


def _pinned(batch_and_state: Batch) -> Batch:
    batch, state = batch_and_state
    return {name: tensor.pin_memory() for name, tensor in batch.items()}, state


def _read_ahead(items: Iterator, count: int) -> Iterator:
    waiting: queue.Queue = queue.Queue(maxsize=count)
    stopped = threading.Event()

    def put(entry) -> bool:
        while not stopped.is_set():
            try:
                waiting.put(entry, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def work():
        try:
            for item in items:
                if not put((item, None)):
                    return
        except Exception as error:
            put((None, error))

    threading.Thread(target=work, daemon=True, name="batches").start()
    try:
        while True:
            item, error = waiting.get()
            if error is not None:
                raise error
            yield item
    finally:
        stopped.set()
