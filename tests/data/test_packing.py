"""Packing: the tokens of documents in blocks, and where positions restart."""

import os

import pytest
import torch
from datasets import Dataset

from hope_hf.data.encoding import make_encoder
from hope_hf.data.packing import IGNORED, TokenBlocks, TokenStream, collate, tokenize
from hope_hf.data.vocabulary import train_tokenizer


def stream_of(*documents: list[int]) -> TokenStream:
    return TokenStream(Dataset.from_dict({"input_ids": list(documents)}))


def test_every_document_begins_with_eos_and_nothing_is_lost():
    tokenizer = train_tokenizer(["the cat sat on the mat and the dog sat on the cat " * 20], 300)
    texts = ["the cat", "", "  \n", "sat on\tthe mät 🐈", None, "x"]
    stream = tokenize(Dataset.from_dict({"text": texts}), make_encoder(tokenizer))
    tokens = stream.read(0, len(stream))
    assert (tokens[stream.starts] == tokenizer.eos_token_id).all()
    assert (tokens == tokenizer.eos_token_id).sum() == len(stream.starts) == 3
    decoded = [tokenizer.decode(piece[1:]) for piece in tokens.tensor_split(stream.starts[1:])]
    assert decoded == ["the cat", "sat on\tthe mät 🐈", "x"]


def test_read_crosses_documents_and_stored_pieces():
    documents = [list(range(5)), [5], list(range(6, 706)), [706, 707, 708]]
    together = Dataset.from_dict({"input_ids": documents})
    # Written in pieces of two rows, as a data set on disk is.
    pieces = together.map(lambda rows: rows, batched=True, writer_batch_size=2)
    stream = TokenStream(pieces)
    assert stream.read(0, 709).tolist() == list(range(709))
    assert stream.read(4, 7).tolist() == [4, 5, 6]
    assert stream.read(700, 800).tolist() == list(range(700, 709))
    assert stream.starts.tolist() == [0, 5, 6, 706]
    assert stream.digest() == TokenStream(together).digest()


def test_blocks_cut_the_stream_and_know_where_documents_begin():
    stream = stream_of([0, 1, 2, 3, 4], [0, 6, 7], [0, 9, 10, 11])
    first, second = TokenBlocks(stream, 5)
    assert first.tokens.tolist() == [0, 1, 2, 3, 4] and first.starts.tolist() == [0]
    assert second.tokens.tolist() == [0, 6, 7, 0, 9] and second.starts.tolist() == [0, 3]
    *_, last = TokenBlocks(stream, 5, keep_last=True)
    assert last.tokens.tolist() == [10, 11] and last.starts.tolist() == []


def test_positions_start_again_at_every_document_and_every_row():
    stream = stream_of([0, 1, 2, 3], [0, 5], [0, 7, 8, 9, 10, 11, 12, 13])
    batch = collate(list(TokenBlocks(stream, 7)), 7, padding=0, restart=True)
    assert batch["input_ids"].tolist() == [[0, 1, 2, 3, 0, 5, 0], [7, 8, 9, 10, 11, 12, 13]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 0, 1, 0], [0, 1, 2, 3, 4, 5, 6]]
    assert torch.equal(batch["labels"], batch["input_ids"])
    assert {tensor.dtype for tensor in batch.values()} == {torch.int64}


def test_a_document_may_begin_behind_the_end_of_another_in_a_row():
    stream = stream_of([0, 1, 2, 3, 4, 5], [0, 7, 8])
    batch = collate([TokenBlocks(stream, 4)[1]], 4, padding=0, restart=True)
    assert batch["input_ids"].tolist() == [[4, 5, 0, 7]]
    assert batch["position_ids"].tolist() == [[0, 1, 0, 1]]


def test_a_carried_batch_has_no_positions_and_padding_is_not_scored():
    stream = stream_of([3, 1, 2], [3, 4])
    batch = collate(list(TokenBlocks(stream, 4, keep_last=True)), 4, padding=3, restart=False)
    assert batch.keys() == {"input_ids", "labels"}
    assert batch["input_ids"].tolist() == [[3, 1, 2, 3], [4, 3, 3, 3]]
    assert batch["labels"].tolist() == [[3, 1, 2, 3], [4, IGNORED, IGNORED, IGNORED]]


def test_a_killed_process_is_a_sentence():
    with pytest.raises(ValueError, match="--preprocessing_num_workers"):
        tokenize(Dataset.from_dict({"text": ["a", "b"]}), lambda texts: os._exit(137), 2)
