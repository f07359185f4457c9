"""Packing: the tokens of documents in blocks, and where positions restart."""

import os

import pytest
import torch
from datasets import Dataset

from hope_hf.data import packing
from hope_hf.data.encoding import make_encoder
from hope_hf.data.packing import IGNORED, RandomBlocks, TokenBlocks, TokenStream, collate, tokenize
from hope_hf.data.vocabulary import train_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["the cat sat on the mat and the dog sat on the cat " * 20], 300)


def stream_of(*documents):
    return TokenStream(Dataset.from_dict({"input_ids": list(documents)}))


def blocks_of(loader_blocks):
    return [block.tokens.tolist() for block in loader_blocks]


def test_every_document_begins_with_eos_and_nothing_is_lost(tokenizer):
    texts = ["the cat", "", "  \n", "sat on\tthe mät 🐈", None, "x"]
    stream = tokenize(Dataset.from_dict({"text": texts}), make_encoder(tokenizer))
    tokens = stream.read(0, len(stream))
    assert (tokens[stream.starts] == tokenizer.eos_token_id).all()
    assert (tokens == tokenizer.eos_token_id).sum() == len(stream.starts) == 3
    pieces = tokens.tensor_split(stream.starts[1:])
    assert [tokenizer.decode(piece[1:]) for piece in pieces] == ["the cat", "sat on\tthe mät 🐈", "x"]


def test_read_crosses_documents_and_stored_pieces():
    documents = [list(range(start, start + length)) for start, length in ((0, 5), (5, 1), (6, 700), (706, 3))]
    together = Dataset.from_dict({"input_ids": documents})
    # Written in pieces of two rows, as a data set on disk is.
    pieces = together.map(lambda rows: rows, batched=True, writer_batch_size=2)
    stream = TokenStream(pieces)
    assert len(stream._parts) == 2
    assert stream.read(0, 709).tolist() == list(range(709))
    assert stream.read(4, 7).tolist() == [4, 5, 6]
    assert stream.read(700, 800).tolist() == list(range(700, 709))
    assert stream.starts.tolist() == [0, 5, 6, 706]
    assert stream.digest() == TokenStream(together).digest()


def test_a_slice_of_stored_documents_gives_their_tokens_only():
    stream = TokenStream(Dataset.from_dict({"input_ids": [[1, 2], [3], [4, 5], [6]]}).select(range(1, 3)))
    assert stream.read(0, 9).tolist() == [3, 4, 5] and stream.starts.tolist() == [0, 1] and len(stream) == 3


def test_blocks_cut_the_stream_and_know_where_documents_begin():
    stream = stream_of([0, 1, 2, 3, 4], [0, 6, 7], [0, 9, 10, 11])
    blocks = TokenBlocks(stream, 5)
    assert blocks_of(blocks) == [[0, 1, 2, 3, 4], [0, 6, 7, 0, 9]]
    assert [block.starts.tolist() for block in blocks] == [[0], [0, 3]]
    whole = TokenBlocks(stream, 5, keep_last=True)
    assert blocks_of(whole)[-1] == [10, 11] and whole[2].starts.tolist() == []


def test_positions_start_again_at_every_document_and_every_row():
    stream = stream_of([0, 1, 2, 3], [0, 5], [0, 7, 8, 9, 10, 11, 12, 13])
    batch = collate(list(TokenBlocks(stream, 7)), 7, padding=0, restart=True)
    assert batch["input_ids"].tolist() == [[0, 1, 2, 3, 0, 5, 0], [7, 8, 9, 10, 11, 12, 13]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 0, 1, 0], [0, 1, 2, 3, 4, 5, 6]]
    assert torch.equal(batch["labels"], batch["input_ids"])
    assert {tensor.dtype for tensor in batch.values()} == {torch.int64}


def test_a_document_may_begin_behind_the_end_of_another_in_a_row():
    stream = stream_of([0, 1, 2, 3, 4, 5], [0, 7, 8])
    row = collate([TokenBlocks(stream, 4)[1]], 4, padding=0, restart=True)
    assert row["input_ids"].tolist() == [[4, 5, 0, 7]] and row["position_ids"].tolist() == [[0, 1, 0, 1]]


def test_a_carried_batch_has_no_positions_and_padding_is_not_scored():
    stream = stream_of([3, 1, 2], [3, 4])
    batch = collate(list(TokenBlocks(stream, 4, keep_last=True)), 4, padding=3, restart=False)
    assert batch.keys() == {"input_ids", "labels"}
    assert batch["input_ids"].tolist() == [[3, 1, 2, 3], [4, 3, 3, 3]]
    assert batch["labels"].tolist() == [[3, 1, 2, 3], [4, IGNORED, IGNORED, IGNORED]]


def test_random_blocks_depend_on_seed_and_index_only():
    first, again = RandomBlocks(4, 16, 50, seed=1), RandomBlocks(9, 16, 50, seed=1)
    assert blocks_of(first) == blocks_of(again[index] for index in range(4))
    rows = blocks_of(first) + blocks_of(RandomBlocks(4, 16, 50, seed=2))
    assert len(set(map(tuple, rows))) == 8
    assert all(0 <= token < 50 for row in rows for token in row)


def test_a_killed_process_is_a_sentence():
    with pytest.raises(ValueError, match="--preprocessing_num_workers"):
        tokenize(Dataset.from_dict({"text": ["a", "b"]}), lambda texts: os._exit(137), 2)


def test_long_documents_are_read_a_few_at_a_time(monkeypatch):
    monkeypatch.setattr(packing, "_READ_TOGETHER", 4_000)
    read = []

    def encode(texts):
        read.append(len(texts))
        return [[0]] * len(texts)

    for length, together in ((1_000, 3), (10_000, 1), (4, 50)):
        read.clear()
        assert len(tokenize(Dataset.from_dict({"text": ["x" * length] * 50}), encode)) == 50
        assert max(read) == together and sum(read) == 50
