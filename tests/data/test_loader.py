"""Loaders: exact continuation, and ranks that together read what one process reads."""

import json
from functools import partial
from itertools import islice, pairwise

import pytest
import torch
from datasets import Dataset

from hope_hf.data.loader import BlockLoader, Layout, Prefetched, Shuffle, StreamLoader
from hope_hf.data.order import Shuffled
from hope_hf.data.packing import TokenBlocks, TokenStream

T = 8


def documents() -> list[list[int]]:
    """150 documents whose tokens are all different, each beginning with 0, of 1 to 12 tokens."""
    lengths = torch.randint(1, 12, (150,), generator=torch.Generator().manual_seed(0))
    rows = []
    token = 1
    for length in lengths.tolist():
        rows.append([0, *range(token, token + length)])
        token += length
    return rows


def block_loader(batch_size=3, rank=0, world_size=1, carry=False, state=None, seed=5):
    blocks = TokenBlocks(TokenStream(Dataset.from_dict({"input_ids": documents()})), T)
    layout = Layout(T, batch_size, rank, world_size, carry)
    return BlockLoader(blocks, Shuffled(len(blocks), seed), layout, not carry, state)


def encode(texts: list[str]) -> list[list[int]]:
    return [json.loads(text) for text in texts]


def stream_loader(batch_size=3, rank=0, world_size=1, carry=False, state=None, buffer_size=1, seed=5):
    texts = [json.dumps(row) for row in documents()]
    rows = Dataset.from_dict({"text": texts}).to_iterable_dataset(num_shards=3)
    layout = Layout(T, batch_size, rank, world_size, carry)
    return StreamLoader(rows, encode, layout, Shuffle(buffer_size, seed), state)


# The last ones: buffers smaller and larger than what is encoded together, and one that holds everything.
KINDS = {
    "blocks-reset": partial(block_loader),
    "blocks-carry": partial(block_loader, carry=True),
    "stream-reset": partial(stream_loader),
    "stream-carry": partial(stream_loader, carry=True),
    "stream-shuffled-7": partial(stream_loader, buffer_size=7),
    "stream-shuffled-70": partial(stream_loader, buffer_size=70),
    "stream-shuffled-all": partial(stream_loader, buffer_size=10_000),
}


def take(loader, count: int) -> list[tuple[dict, dict]]:
    """The next batches, each with the state after it."""
    return list(islice(loader, count))


def assert_same(left, right):
    """Equal batches; two states may describe the same place differently."""
    assert len(left) == len(right)
    for (batch, _), (other, _) in zip(left, right, strict=True):
        assert batch.keys() == other.keys()
        assert all(torch.equal(batch[name], other[name]) for name in batch)


def tokens_of(items) -> list[int]:
    """All tokens but the document heads, which are 0 in every document."""
    tokens = []
    for batch, _ in items:
        tokens += filter(None, batch["input_ids"].flatten().tolist())
    return tokens


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_resume_is_exact(kind, world_size):
    # 110 batches of 3 rows of 8 tokens: more than two epochs.
    make = partial(KINDS[kind], rank=world_size - 1, world_size=world_size)
    whole = take(make(), 110)
    for cut in (1, 17, 38, 39, 90):
        state = json.loads(json.dumps(whole[cut - 1][1]))
        assert_same(whole[cut : cut + 20], take(make(state=state), 20))


@pytest.mark.parametrize("kind", ["blocks-carry", "stream-shuffled-7"])
def test_reading_ahead_changes_neither_batches_nor_states(kind):
    plain = take(KINDS[kind](), 40)
    assert_same(plain, take(Prefetched(KINDS[kind](), ahead=3, pin_memory=False), 40))
    resumed = Prefetched(KINDS[kind](state=plain[9][1]), ahead=3, pin_memory=False)
    assert_same(plain[10:30], take(resumed, 20))


def test_an_error_while_reading_ahead_reaches_the_reader():
    class Failing:
        batches_per_epoch = 1

        def __iter__(self):
            yield {}, {}
            raise ValueError("the second batch is broken")

    batches = iter(Prefetched(Failing(), ahead=2, pin_memory=False))
    next(batches)
    with pytest.raises(ValueError, match="second batch"):
        next(batches)


def test_ranks_read_the_rows_of_one_process_also_where_it_was_resumed():
    single = take(block_loader(batch_size=6), 30)
    for state, expected in ((None, single[:20]), (single[9][1], single[10:])):
        one = take(block_loader(rank=0, world_size=2, state=state), 20)
        two = take(block_loader(rank=1, world_size=2, state=state), 20)
        for (batch, after), (first, first_after), (second, second_after) in zip(expected, one, two, strict=True):
            together = torch.stack([first["input_ids"], second["input_ids"]], dim=1).flatten(0, 1)
            assert torch.equal(together, batch["input_ids"])
            assert first_after == second_after == after


def test_no_two_ranks_read_the_same_document_of_a_stream():
    tokens = []
    for rank in range(2):
        # Enough batches for every rank to reach its end and for no rank to read half of its share twice.
        tokens += set(tokens_of(take(stream_loader(rank=rank, world_size=2), 100)))
    assert sorted(tokens) == [token for row in documents() for token in row if token]


@pytest.mark.parametrize("kind", ["blocks-carry", "stream-carry"])
def test_carried_rows_are_contiguous(kind):
    batches = [batch["input_ids"] for batch, _ in take(KINDS[kind](rank=1, world_size=2), 60)]
    follows = dict(pairwise(sum(documents(), [])))
    for row in torch.cat(batches, dim=1).tolist():
        inside = [(left, right) for left, right in pairwise(row) if left and right]
        assert len(inside) > 200
        for left, right in inside:
            assert follows[left] == right


@pytest.mark.parametrize("kind", ["blocks-carry", "stream-carry", "stream-reset"])
def test_a_state_of_another_number_of_ranks_is_refused(kind):
    ((_, state),) = take(KINDS[kind](), 1)
    with pytest.raises(ValueError, match="number of"):
        KINDS[kind](rank=0, world_size=2, state=state)


@pytest.mark.parametrize("place", [{"document": 65}, {"offset": 99}, {"document": 64, "offset": 1}])
def test_a_stream_that_changed_under_the_checkpoint_is_refused(place):
    ((_, state),) = take(stream_loader(), 1)
    state["packers"][0] |= place
    with pytest.raises(ValueError, match="not those that the checkpoint was reading"):
        stream_loader(state=state)


def test_a_stream_without_documents_for_a_rank_says_so():
    rows = Dataset.from_dict({"text": ["[0, 1]"]}).to_iterable_dataset()
    layout = Layout(T, 1, 1, 2, False)
    with pytest.raises(ValueError, match="--streaming.*share 2 of 2"):
        next(iter(StreamLoader(rows, encode, layout, Shuffle(9, 0))))


def passes_of(**options) -> list[list[int]]:
    """First tokens of the documents in each of three passes of a stream."""
    firsts = {row[1] for row in documents()}
    read = [token for token in tokens_of(take(stream_loader(**options), 200)) if token in firsts]
    count = len(firsts)
    return [read[:count], read[count : 2 * count], read[2 * count : 3 * count]]


@pytest.mark.parametrize("buffer_size", [7, 70, 10_000])
def test_a_stream_is_shuffled_by_the_seed_and_anew_in_every_pass(buffer_size):
    in_order = [row[1] for row in documents()]
    passes = passes_of(buffer_size=buffer_size)
    assert passes == passes_of(buffer_size=buffer_size)
    other, *_ = passes_of(buffer_size=buffer_size, seed=6)
    orders = [in_order, *passes, other]
    assert len(set(map(tuple, orders))) == 5
    assert all(sorted(order) == in_order for order in orders)
    # a document moves by less than the buffer
    moves = [abs(in_order.index(token) - place) for place, token in enumerate(passes[0])]
    assert min(buffer_size, len(in_order)) // 2 < max(moves) < buffer_size
