"""Loaders: exact continuation, and ranks that together read what one process reads."""

import json
from functools import partial
from itertools import islice, pairwise

import pytest
import torch
from datasets import Dataset

from hope_hf.data import loader
from hope_hf.data.loader import BlockLoader, Layout, Prefetched, Shuffle, StreamLoader
from hope_hf.data.order import Shuffled
from hope_hf.data.packing import TokenBlocks, TokenStream

T = 8


def documents(count=150, seed=0):
    """Documents whose tokens are all different, each beginning with 0, of 1 to 12 tokens."""
    lengths = torch.randint(1, 12, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
    token, rows = 1, []
    for length in lengths:
        rows.append([0, *range(token, token + length)])
        token += length
    return rows


def block_loader(batch_size=3, rank=0, world_size=1, carry=False, state=None, seed=5):
    blocks = TokenBlocks(TokenStream(Dataset.from_dict({"input_ids": documents()})), T)
    return BlockLoader(
        blocks, Shuffled(len(blocks), seed), Layout(T, batch_size, rank, world_size, carry), not carry, state
    )


def stream_loader(batch_size=3, rank=0, world_size=1, carry=False, state=None, buffer_size=1, seed=5):
    rows = Dataset.from_dict({"text": [json.dumps(row) for row in documents()]}).to_iterable_dataset(num_shards=3)
    layout = Layout(T, batch_size, rank, world_size, carry)
    return StreamLoader(rows, lambda texts: list(map(json.loads, texts)), layout, Shuffle(buffer_size, seed), state)


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


def take(loader, count):
    return list(islice(loader, count))


def assert_same(left, right):
    """Equal batches; two states may describe the same place differently."""
    assert len(left) == len(right)
    for (batch, _), (other, _) in zip(left, right, strict=True):
        assert batch.keys() == other.keys()
        assert all(torch.equal(batch[name], other[name]) for name in batch)


def tokens_of(items):
    """All tokens but the document heads, which are 0 in every document."""
    return [token for batch, _ in items for token in batch["input_ids"].flatten().tolist() if token]


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_resume_is_exact(kind, world_size):
    # 110 batches of 3 rows of 8 tokens: more than two epochs.
    make = partial(KINDS[kind], rank=world_size - 1, world_size=world_size)
    whole = take(make(), 110)
    for cut in (1, 17, 38, 39, 90):
        state = json.loads(json.dumps(whole[cut - 1][1]))
        assert_same(whole[cut : cut + 20], take(make(state=state), 20))


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_resumed_again_and_again_reads_what_one_run_reads(kind):
    pieces, state = [], None
    while len(pieces) < 90:
        pieces += take(KINDS[kind](state=state), 7)
        state = json.loads(json.dumps(pieces[-1][1]))
    assert_same(take(KINDS[kind](), len(pieces)), pieces)


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
        ranks = [take(block_loader(rank=rank, world_size=2, state=state), 20) for rank in range(2)]
        for (batch, after), (first, first_after), (second, second_after) in zip(expected, *ranks, strict=True):
            together = torch.stack([first["input_ids"], second["input_ids"]], dim=1).flatten(0, 1)
            assert torch.equal(together, batch["input_ids"])
            assert first_after == second_after == after


def rows_of_epoch(loader) -> list[tuple[int, ...]]:
    return [tuple(batch["input_ids"][0].tolist()) for batch, _ in take(loader, len(loader.blocks))]


def test_an_epoch_reads_every_block_once_and_the_next_one_in_another_order():
    loader = block_loader(batch_size=1)
    first, second = rows_of_epoch(loader), rows_of_epoch(loader)
    assert sorted(first) == sorted(second) == sorted(tuple(block.tokens.tolist()) for block in loader.blocks)
    assert first != second and first != rows_of_epoch(block_loader(batch_size=1, seed=6))


@pytest.mark.parametrize("world_size", [1, 2])
def test_no_two_ranks_read_the_same_document_of_a_stream(world_size):
    expected = sorted(token for row in documents() for token in row if token)
    # Enough batches for every rank to reach its end and for no rank to read half of its share twice.
    epochs = [take(stream_loader(rank=rank, world_size=world_size), 100) for rank in range(world_size)]
    seen = [set(tokens_of(batches)) for batches in epochs]
    assert sorted(set.union(*seen)) == expected
    assert sum(map(len, seen)) == len(expected)


@pytest.mark.parametrize("kind", ["blocks-carry", "stream-carry"])
def test_carried_rows_are_contiguous(kind):
    batches = [batch["input_ids"] for batch, _ in take(KINDS[kind](rank=1, world_size=2), 60)]
    follows = dict(pairwise(sum(documents(), [])))
    for row in torch.cat(batches, dim=1).tolist():
        inside = [(left, right) for left, right in pairwise(row) if left and right]
        assert len(inside) > 200
        assert all(follows[left] == right for left, right in inside)


def test_carried_rows_share_an_epoch_without_overlap():
    steps = block_loader(batch_size=3, rank=0, world_size=2, carry=True).batches_per_epoch
    tokens = []
    for rank in range(2):
        tokens += tokens_of(take(block_loader(batch_size=3, rank=rank, world_size=2, carry=True), steps))
    assert len(tokens) == len(set(tokens))


def test_fewer_blocks_than_rows_still_fill_a_batch():
    blocks = TokenBlocks(TokenStream(Dataset.from_dict({"input_ids": [list(range(2 * T))]})), T)
    loader = BlockLoader(blocks, Shuffled(2, seed=0), Layout(T, 5, 0, 1, False), True)
    (batch, _), (following, _) = take(loader, 2)
    first_tokens = torch.cat([batch["input_ids"][:, 0], following["input_ids"][:, 0]]).tolist()
    assert sorted(first_tokens) == [0] * 5 + [T] * 5


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
        next(iter(StreamLoader(rows, lambda texts: list(map(json.loads, texts)), layout, Shuffle(9, 0))))


def passes_of(**options) -> list[list[int]]:
    """First tokens of the documents in each of three passes of a stream."""
    firsts = {row[1] for row in documents()}
    read = [token for token in tokens_of(take(stream_loader(**options), 200)) if token in firsts]
    return [read[start : start + len(firsts)] for start in (0, len(firsts), 2 * len(firsts))]


@pytest.mark.parametrize("buffer_size", [7, 70, 10_000])
def test_a_stream_is_shuffled_by_the_seed_and_anew_in_every_pass(buffer_size):
    in_order = [row[1] for row in documents()]
    passes = passes_of(buffer_size=buffer_size)
    assert all(sorted(read) == in_order and read != in_order for read in passes)
    assert passes == passes_of(buffer_size=buffer_size)
    assert len({tuple(read) for read in [*passes, passes_of(buffer_size=buffer_size, seed=6)[0]]}) == 4
    places = {token: place for place, token in enumerate(in_order)}
    moves = [abs(places[token] - place) for place, token in enumerate(passes[0])]
    assert max(moves) < buffer_size and max(moves) > min(buffer_size, len(in_order)) // 2


def test_a_buffer_of_one_document_keeps_the_order_of_the_stream():
    assert passes_of(buffer_size=1) == [[row[1] for row in documents()]] * 3


def test_a_buffer_of_long_documents_is_smaller(monkeypatch):
    monkeypatch.setattr(loader, "_CHARACTERS_OF_BUFFER", 200)
    in_order = [row[1] for row in documents()]
    places = {token: place for place, token in enumerate(in_order)}
    read = passes_of(buffer_size=10_000)[0]
    assert sorted(read) == in_order and 0 < max(abs(places[token] - place) for place, token in enumerate(read)) < 30
