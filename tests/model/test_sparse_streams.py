"""Streams of sparse attention: tiles with gradients by hand against plain operations on the whole text, in float64."""

import pytest
import torch

from hope_hf.model.chunks import convolution_spans, plan_slots
from hope_hf.model.sparse_branches import QkvSizes, QkvWeights, make_qkv
from hope_hf.model.sparse_fast import make_qkv_tiled

BLOCK, REACH, WIDTH = 8, 3, 4
SIZES = QkvSizes(heads=4, key_heads=2, epsilon=1e-6)


def earlier(padding_mask):
    """What a call of seven tokens has read."""
    return plan_slots(BLOCK, (2, 7), torch.device("cpu"), padding_mask=padding_mask).past


LAYOUTS = {
    "a text": {},
    "a text that goes on": {"past": earlier(None)},
    "rows of unequal history": {"past": earlier(torch.tensor([[0] * 3 + [1] * 4, [1] * 7]))},
    "padding": {"padding_mask": torch.tensor([[1] * 45, [0] * 5 + [1] * 40])},
    "documents": {"position_ids": torch.tensor([[*range(20), *range(25)], [*range(2), *range(43)]])},
}


@pytest.mark.parametrize("tile", [8, 16, 64])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_tiles_equal_plain_operations(layout, tile):
    plan = plan_slots(BLOCK, (2, 45), torch.device("cpu"), **layout)
    length = 45 if plan.valid is None else plan.valid.shape[1]
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    channels = (SIZES.heads + 2 * SIZES.key_heads) * WIDTH
    leaves = [random(2, length, channels), random(2, REACH, channels)]
    leaves += [random(REACH + 1, 1, 1, channels), random(WIDTH), random(WIDTH)]
    leaves = [leaf.requires_grad_() for leaf in leaves]
    angles = random(1, length, WIDTH), random(1, length, WIDTH)
    (whole,), spans = (convolution_spans(plan, length, REACH, size) for size in (length, tile))
    assert len(spans) == -(-length // tile)
    weights = QkvWeights(*leaves[2:])
    expected = make_qkv(*leaves[:2], weights, angles, whole, SIZES)
    found = make_qkv_tiled(*leaves[:2], weights, angles, spans, SIZES)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-11)
    wanted = [random(*part.shape) for part in expected]
    for one, other in zip(*(torch.autograd.grad(made, leaves, wanted) for made in (found, expected)), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-11)
