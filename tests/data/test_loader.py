"""Loaders: exact continuation, and ranks that together read what one process reads."""

import json
from itertools import islice

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


KINDS = {
    "blocks-reset": lambda **kwargs: block_loader(carry=False, **kwargs),
    "blocks-carry": lambda **kwargs: block_loader(carry=True, **kwargs),
    "stream-reset": lambda **kwargs: stream_loader(carry=False, **kwargs),
    "stream-carry": lambda **kwargs: stream_loader(carry=True, **kwargs),
    # Buffers smaller and larger than what is encoded together, and one that holds everything.
    "stream-shuffled-7": lambda **kwargs: stream_loader(buffer_size=7, **kwargs),
    "stream-shuffled-70": lambda **kwargs: stream_loader(buffer_size=70, **kwargs),
    "stream-shuffled-all": lambda **kwargs: stream_loader(buffer_size=10_000, **kwargs),
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
def test_resume_is_exact_at_every_batch(kind, world_size):
    # 130 batches of 3 rows of 8 tokens: more than two epochs.
    for rank in range(world_size):
        whole = take(KINDS[kind](rank=rank, world_size=world_size), 130)
        for cut in (1, 2, 17, 38, 39, 64, 100):
            state = json.loads(json.dumps(whole[cut - 1][1]))
            resumed = KINDS[kind](rank=rank, world_size=world_size, state=state)
            assert_same(whole[cut : cut + 20], take(resumed, 20))


@pytest.mark.parametrize("hop", [1, 7, 20])
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_resumed_again_and_again_reads_what_one_run_reads(kind, hop):
    pieces, state = [], None
    while len(pieces) < 90:
        pieces += take(KINDS[kind](state=state), hop)
        state = json.loads(json.dumps(pieces[-1][1]))
    assert_same(take(KINDS[kind](), len(pieces)), pieces)


@pytest.mark.parametrize("kind", KINDS)
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


def test_ranks_read_the_rows_of_one_process_with_a_larger_batch():
    single = take(block_loader(batch_size=6), 30)
    ranks = [take(block_loader(batch_size=3, rank=rank, world_size=2), 30) for rank in range(2)]
    for step, (batch, state) in enumerate(single):
        together = torch.stack([ranks[rank][step][0]["input_ids"] for rank in range(2)], dim=1).flatten(0, 1)
        assert torch.equal(together, batch["input_ids"])
        assert ranks[0][step][1] == ranks[1][step][1] == state


def test_an_epoch_reads_every_block_once_and_the_next_one_in_another_order():
    loader = block_loader(batch_size=1)
    count = len(loader.blocks)
    epochs = [[tuple(batch["input_ids"][0].tolist()) for batch, _ in take(loader, count)] for _ in range(2)]
    blocks = sorted(tuple(block.tokens.tolist()) for block in loader.blocks)
    assert sorted(epochs[0]) == sorted(epochs[1]) == blocks
    assert epochs[0] != epochs[1]
    other_seed = [
        tuple(batch["input_ids"][0].tolist()) for batch, _ in take(block_loader(batch_size=1, seed=6), count)
    ]
    assert other_seed != epochs[0]


@pytest.mark.parametrize("world_size", [1, 2])
def test_no_two_ranks_read_the_same_document_of_a_stream(world_size):
    expected = sorted(token for row in documents() for token in row if token)
    # Enough batches for every rank to reach its end and for no rank to read half of its share twice.
    epochs = [take(stream_loader(rank=rank, world_size=world_size), 1000) for rank in range(world_size)]
    seen = [set(tokens_of(batches)) for batches in epochs]
    assert sorted(set.union(*seen)) == expected
    assert sum(map(len, seen)) == len(expected)


@pytest.mark.parametrize("kind", ["blocks-carry", "stream-carry"])
def test_carried_rows_are_contiguous(kind):
    loader = KINDS[kind](batch_size=3, rank=1, world_size=2)
    batches = [batch["input_ids"] for batch, _ in take(loader, 60)]
    corpus = [token for row in documents() for token in row]
    follows = {token: following for token, following in zip(corpus, [*corpus[1:], corpus[0]], strict=True) if token}
    for row in range(3):
        tokens = torch.cat([batch[row] for batch in batches]).tolist()
        inside = [(left, right) for left, right in zip(tokens, tokens[1:], strict=False) if left and right]
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


def test_shuffled_blocks_continue_on_another_number_of_ranks():
    whole = take(block_loader(batch_size=4), 10)
    resumed = [take(block_loader(batch_size=2, rank=rank, world_size=2, state=whole[4][1]), 5) for rank in range(2)]
    for step in range(5):
        together = torch.stack([resumed[rank][step][0]["input_ids"] for rank in range(2)], dim=1).flatten(0, 1)
        assert torch.equal(together, whole[5 + step][0]["input_ids"])


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
