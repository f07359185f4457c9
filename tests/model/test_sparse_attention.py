"""Sparse attention: what it selects, what it contains, how it grows, and texts that part.

`test_equivalence.py` compares it with the paper's equations query by query, in all situations.
"""

import pytest
import torch
from definitions import angles, assert_as_defined, dense_sparse
from mixers import LargestTensor
from sparse_mixers import FEW, mixed, random_model, texts

from hope_hf import HopeCache
from hope_hf.fast import sparse_qkv
from hope_hf.model.sparse_branches import SparseSizes, select_blocks

SIZES = {
    "few blocks": FEW,
    "strides as large as blocks": FEW | {"sparse_compress_stride": 8},
    "one block": FEW | {"sparse_top_k": 1},
    "all blocks": FEW | {"sparse_top_k": 100},
    "strides of one token": dict(sparse_block_size=4, sparse_compress_stride=1, sparse_top_k=3, sparse_window=4),
}


def random_ids(*shape):
    return torch.randint(16, shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("options", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("length", [3, 45])
def test_a_text_equals_the_equations(options, length):
    assert_as_defined(random_model(**options), random_ids(2, length))


def test_the_text_chooses_among_blocks():
    """What the comparison above is worth: queries read blocks that are neither first nor last, and not all."""
    model = random_model(**FEW)
    _, read = dense_sparse(model.model.layers[0].mixer, texts(45), angles(torch.arange(45)[None], 8))
    own = [t // 8 for t in range(45) for _ in range(2)]
    between = [blocks - {0, last, last - 1} for blocks, last in zip(read, own, strict=True)]
    assert all(len(b) <= 1 for b in between) and len(set().union(*between)) >= 3
    assert any(len(blocks) < last + 1 for blocks, last in zip(read, own, strict=True))


def test_forced_blocks_come_first():
    """Own, first and previous, in that order where there is no room for all; then by attention."""

    def sizes(top_k):
        return SparseSizes(block=8, stride=4, top_k=top_k, window=8, heads=1, key_heads=1, epsilon=1e-6)

    attention = torch.zeros(1, 1, 1, 12, dtype=torch.float64)
    attention[..., 4:6], attention[..., 6:8] = 1.0, 2.0
    at, first = torch.tensor([[5 * 8 + 3]]), torch.tensor([[0]])
    for top_k, expected in ((1, [5]), (2, [0, 5]), (3, [0, 4, 5]), (4, [0, 3, 4, 5]), (5, [0, 2, 3, 4, 5])):
        chosen = select_blocks(attention, at, first, sizes(top_k))
        assert sorted(chosen.flatten().tolist()) == expected
    # a document that begins at the third block sees none before
    chosen = select_blocks(attention, at, torch.tensor([[24]]), sizes(top_k=5))
    assert sorted(chosen.flatten().tolist()) == [-1, -1, 3, 4, 5]


def test_nothing_of_the_size_of_the_square_is_built():
    """The largest tensor of a step grows in proportion to the text."""
    largest = []
    for length in (512, 2048):
        model = random_model(**FEW)
        with LargestTensor() as mode:
            model.model(random_ids(1, length), use_cache=False).last_hidden_state.sum().backward()
        largest.append(mode.size)
    assert largest[1] <= 4.5 * largest[0] and largest[1] < 2048**2 / 4


@torch.no_grad()
def test_a_text_that_goes_on_is_not_copied():
    model, cache = random_model(**FEW), HopeCache(random_model(**FEW).config)
    places = []
    for part in random_ids(2, 12).split([9, 1, 1, 1], dim=1):
        model(part, cache=cache)
        places.append(cache.state_tensors()["0.slot_keys"].data_ptr())
    assert len(set(places[1:])) == 1


@pytest.mark.parametrize("modes", [(torch.inference_mode, torch.no_grad), (torch.no_grad, torch.inference_mode)])
def test_a_text_goes_on_in_another_mode(modes):
    model, ids = random_model(**FEW), random_ids(2, 15)
    cache = HopeCache(model.config)
    with modes[0]():
        model(ids[:, :10], cache=cache)
    with modes[1]():
        parts = [model(part, cache=cache).logits for part in ids[:, 10:].split(1, dim=1)]
        whole = model(ids).logits[:, 10:]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=0, atol=1e-12)


def test_a_backward_pass_within_autocast_is_that_without():
    gradients = []
    for within in (False, True):
        model = random_model(**FEW).float()
        with torch.autocast("cpu", torch.bfloat16):
            _, output = mixed(model, texts(2, 45).float().requires_grad_())
        loss = output.float().square().sum()
        with torch.autocast("cpu", torch.bfloat16, enabled=within):
            loss.backward()
        gradients.append([parameter.grad for parameter in model.model.layers[0].mixer.parameters()])
    # linear maps are in bfloat16 either way
    torch.testing.assert_close(*gradients, rtol=0, atol=0)


def test_blocks_larger_than_a_tile_of_time(monkeypatch, tiny_model):
    """A text with padding that goes on within a block."""
    sizes = dict(sparse_block_size=16, sparse_compress_stride=4, sparse_top_k=3, sparse_window=16)
    model = tiny_model(torch.float64, layer_types=["sparse_attention"] * 2, **sizes)
    ids = torch.arange(2 * 30).view(2, 30)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0

    def read():
        cache = HopeCache(model.config)
        with torch.no_grad():
            model(ids[:, :15], attention_mask=mask[:, :15], cache=cache)
            return model(ids[:, 15:], attention_mask=mask, cache=cache).logits

    expected = read()
    monkeypatch.setattr(sparse_qkv, "_TIME_TILE", 8)
    torch.testing.assert_close(read(), expected, rtol=0, atol=1e-10)
