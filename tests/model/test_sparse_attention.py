"""Sparse attention: what it selects, what it contains, how it grows, and texts that part.

`test_equivalence.py` compares it with the paper's equations query by query, in all situations.
"""

import pytest
import torch
from definitions import assert_as_defined
from mixers import LargestTensor
from sparse_mixers import FEW, mixed, random_model, texts

from hope_hf import HopeCache
from hope_hf.model.sparse_branches import SparseSizes, select_blocks

SIZES = {
    "one block": FEW | {"sparse_top_k": 1},
    "all blocks, strides of a token": FEW | {"sparse_top_k": 100, "sparse_compress_stride": 1},
}


def random_ids(*shape):
    return torch.randint(16, shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("options", SIZES.values(), ids=SIZES)
def test_a_text_equals_the_equations(options):
    assert_as_defined(random_model(**options), random_ids(2, 30))


# the number of blocks that are read, the first position of the document, and the blocks
CHOICES = [
    (1, 0, [5]),
    (2, 0, [0, 5]),
    (3, 0, [0, 4, 5]),
    (4, 0, [0, 3, 4, 5]),
    (5, 0, [0, 2, 3, 4, 5]),
    # a document that begins at the third block sees none before
    (5, 24, [-1, -1, 3, 4, 5]),
]


@pytest.mark.parametrize("top_k, first, expected", CHOICES)
def test_forced_blocks_come_first(top_k, first, expected):
    """Own, first and previous, in that order where there is no room for all; then by attention."""
    attention = torch.zeros(1, 1, 1, 12, dtype=torch.float64)
    attention[..., 4:6] = 1.0
    attention[..., 6:8] = 2.0
    position = torch.tensor([[5 * 8 + 3]])
    sizes = SparseSizes(block=8, stride=4, top_k=top_k, window=8, heads=1, key_heads=1, epsilon=1e-6)
    chosen = select_blocks(attention, position, torch.tensor([[first]]), sizes)
    assert sorted(chosen.flatten().tolist()) == expected


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


def test_a_text_that_began_in_inference_mode_goes_on_in_another():
    model, ids = random_model(**FEW), random_ids(2, 15)
    cache = HopeCache(model.config)
    with torch.inference_mode():
        model(ids[:, :10], cache=cache)
    with torch.no_grad():
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
