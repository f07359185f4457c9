"""Sparse attention against the paper's equations query by query, in float64: outputs and gradients."""

import re

import pytest
import torch
from dense_sparse import dense_sparse
from huggingface_hub.errors import StrictDataclassError
from mixers import LargestTensor
from sparse_mixers import FEW, WIDTH, angles_of, config_of, random_mixer, run, texts

from hope_hf import HopeCache, HopeConfig, HopeForCausalLM
from hope_hf.fast import sparse_reads
from hope_hf.fast.sparse_reads import make_qkv_tiled
from hope_hf.model import sparse_text
from hope_hf.model.chunks import convolution_spans, plan_slots
from hope_hf.model.sparse_branches import (
    QkvSizes,
    QkvWeights,
    SparseKeys,
    SparseSizes,
    make_qkv,
    read_sparse,
    select_blocks,
)

SIZES = {
    "few blocks": FEW,
    "strides as large as blocks": FEW | {"sparse_compress_stride": 8},
    "one block": FEW | {"sparse_top_k": 1},
    "two blocks": FEW | {"sparse_top_k": 2, "sparse_window": 8},
    "all blocks": FEW | {"sparse_top_k": 100},
    "strides of one token": dict(sparse_block_size=4, sparse_compress_stride=1, sparse_top_k=3, sparse_window=4),
}


def assert_equal_with_gradients(ours, theirs, leaves):
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-9)
    weights = torch.randn(ours.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    found, expected = (torch.autograd.grad((out * weights).sum(), leaves, allow_unused=True) for out in (ours, theirs))
    for leaf, *both in zip(leaves, found, expected, strict=True):
        one, other = (torch.zeros_like(leaf) if grad is None else grad for grad in both)
        torch.testing.assert_close(one, other, rtol=0, atol=1e-9)


@pytest.mark.parametrize("options", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("length, tile", [(1, 512), (3, 512), (45, 512), (45, 16)])
def test_a_whole_text(monkeypatch, options, length, tile):
    """Also where queries, keys and values are made in several tiles."""
    monkeypatch.setattr(sparse_reads, "_TIME_TILE", tile)
    mixer, hidden_states = random_mixer(**options), texts(2, length).requires_grad_()
    angles = angles_of(mixer, hidden_states)
    expected = torch.stack([dense_sparse(mixer, row, angles)[0] for row in hidden_states])
    assert_equal_with_gradients(run(mixer, hidden_states), expected, [hidden_states, *mixer.parameters()])


def test_the_text_chooses_among_blocks():
    """What the comparison above is worth: queries read blocks that are neither first nor last, and not all."""
    mixer = random_mixer(**FEW)
    _, read = dense_sparse(mixer, texts(45), angles_of(mixer, texts(45)))
    own = [t // 8 for t in range(45) for _ in range(2)]
    between = [blocks - {0, last, last - 1} for blocks, last in zip(read, own, strict=True)]
    assert all(len(b) <= 1 for b in between) and len(set().union(*between)) >= 3
    assert any(len(blocks) < last + 1 for blocks, last in zip(read, own, strict=True))


@pytest.mark.parametrize("tile, window", [(8, 16), (24, 16), (24, 32), (128, 16)])
@pytest.mark.parametrize("base, documents", [(0, False), (5, False), (24, False), (0, True), (24, True)])
def test_tiles_equal_single_queries(monkeypatch, tile, window, base, documents):
    """The two paths of the model, over keys of earlier calls and documents in a row."""
    monkeypatch.setattr(sparse_reads, "_QUERY_TILE", tile)
    monkeypatch.setattr(sparse_reads, "_GATHERED", tile)
    # the last tile is shorter than those before
    sizes, length = SparseSizes(8, 4, 3, window), 85
    room = -(-(base + length) // 8) * 8
    shapes = [(2, 2, 3, length, 8), (2, 2, 3, length, 3), *[(2, 2, room, 8)] * 2, *[(2, 2, room // 4, 8)] * 2]
    generator = torch.Generator().manual_seed(0)
    leaves = [torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes]
    at = torch.arange(base, base + length).expand(2, -1)
    first = torch.zeros_like(at)
    if documents:
        first[0, 16:], first[0, 24:], first[1, 8:] = base + 16, base + 24, base + 8
    queries, gates, held = *leaves[:2], SparseKeys(*leaves[2:])
    one, chosen = read_sparse(queries, gates, held, at, first, sizes)
    other, also = sparse_reads.read_sparse_fused(queries, gates, held, base, first if documents else None, sizes)
    assert torch.equal(chosen.sort(-1).values, also.sort(-1).values)
    assert_equal_with_gradients(one, other, leaves)


def test_all_blocks_and_a_gate_on_them_is_full_attention():
    mixer = random_mixer(**FEW | {"sparse_top_k": 100})
    hidden_states = texts(2, 45)
    gates = torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64).expand(2, 45, 4, 3)
    mixer.branch_gates = lambda _: gates
    plan = plan_slots(mixer.sizes.block, (2, 45), hidden_states.device)
    inputs = mixer.inputs(hidden_states, angles_of(mixer, hidden_states))
    query, key, value, _ = sparse_text.text_qkv(inputs, None, plan, mixer.qkv_sizes, plain=False)
    reads = torch.nn.functional.scaled_dot_product_attention(
        query.flatten(1, 2), key, value, is_causal=True, scale=1.0, enable_gqa=True
    )
    expected = mixer.o_proj(reads.transpose(1, 2).flatten(2))
    torch.testing.assert_close(run(mixer, hidden_states), expected, rtol=0, atol=1e-9)
    # the control: with few blocks it is not
    few = random_mixer(**FEW | {"sparse_top_k": 2})
    few.branch_gates = mixer.branch_gates
    assert (run(few, hidden_states) - expected).abs().max() > 1e-2


def test_forced_blocks_come_first():
    """Own, first and previous, in that order where there is no room for all; then by attention."""
    attention = torch.zeros(1, 1, 1, 12, dtype=torch.float64)
    attention[..., 4:6], attention[..., 6:8] = 1.0, 2.0
    at, first = torch.tensor([[5 * 8 + 3]]), torch.tensor([[0]])
    for top_k, expected in ((1, [5]), (2, [0, 5]), (3, [0, 4, 5]), (4, [0, 3, 4, 5]), (5, [0, 2, 3, 4, 5])):
        chosen = select_blocks(attention, at, first, SparseSizes(8, 4, top_k, 8))
        assert sorted(chosen.flatten().tolist()) == expected
    # a document that begins at the third block sees none before
    chosen = select_blocks(attention, at, torch.tensor([[24]]), SparseSizes(8, 4, 5, 8))
    assert sorted(chosen.flatten().tolist()) == [-1, -1, 3, 4, 5]


def test_nothing_of_the_size_of_the_square_is_built():
    """The largest tensor of a step grows in proportion to the text."""

    largest = []
    for length in (512, 2048):
        mixer = random_mixer(**FEW)
        hidden_states = texts(1, length).requires_grad_()
        with LargestTensor() as mode:
            run(mixer, hidden_states).sum().backward()
        largest.append(mode.size)
    assert largest[1] <= 4.5 * largest[0] and largest[1] < 2048**2 / 4


@torch.no_grad()
def test_texts_that_part_at_a_snapshot_do_not_overwrite_each_other():
    """A call writes into the tensors of the one before; two texts that go on from the same token must not."""
    model = HopeForCausalLM(config_of(**FEW)).double()
    generator = torch.Generator().manual_seed(0)
    start, one, other, end = (torch.randint(16, (2, n), generator=generator) for n in (10, 3, 2, 4))
    cache = HopeCache(model.config)
    model(start, cache=cache)
    fork = cache.snapshot()
    model(one, cache=cache)
    tensors = [cache.layers[0].state.slot_keys]
    after_one = cache.snapshot()
    model(other, cache=cache.rollback(fork))
    tensors.append(cache.layers[0].state.slot_keys)
    for middle, snapshot in ((other, cache.snapshot()), (one, after_one)):
        ours = model(end, cache=cache.rollback(snapshot)).logits
        whole = model(torch.cat([start, middle, end], dim=1)).logits
        torch.testing.assert_close(ours, whole[:, -4:], rtol=0, atol=1e-12)
    # the first went on in place, the second in a copy
    assert fork.layers[0].state.slot_keys is tensors[0] and fork.layers[0].state.slot_keys is not tensors[1]


@pytest.mark.parametrize("modes", [(torch.inference_mode, torch.no_grad), (torch.no_grad, torch.inference_mode)])
def test_a_text_goes_on_in_another_mode(modes):
    model = HopeForCausalLM(config_of(**FEW)).double()
    ids = torch.randint(16, (2, 15), generator=torch.Generator().manual_seed(0))
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
        mixer = random_mixer(**FEW).float()
        hidden_states = texts(2, 45).float().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            loss = run(mixer, hidden_states).float().sum()
        with torch.autocast("cpu", torch.bfloat16, enabled=within):
            loss.backward()
        gradients.append([parameter.grad for parameter in mixer.parameters()])
    # linear maps are in bfloat16 either way
    torch.testing.assert_close(*gradients, rtol=0, atol=0)


ERRORS = {
    "block and window": ({"sparse_window": 100}, r"`sparse_block_size` \(64\) must divide `sparse_window` \(100\)"),
    "stride": ({"sparse_compress_stride": 24}, r"`sparse_compress_stride` \(24\) must divide `sparse_block_size`"),
    "top k": ({"sparse_top_k": 0}, "`sparse_top_k` must be at least 1, got 0"),
    "block": ({"sparse_block_size": 0}, "`sparse_block_size` must be at least 1, got 0"),
    "heads": ({"num_key_value_heads": 3}, r"`num_attention_heads` \(4\) must be a multiple of"),
    "kind": ({"layer_types": ["sparse"]}, "`layer_types` holds 'sparse': choose among hope_memory, sparse_attention"),
}


@pytest.mark.parametrize("options, sentence", ERRORS.values(), ids=ERRORS)
def test_bad_configurations(options, sentence):
    base = dict(vocab_size=16, hidden_size=WIDTH, num_hidden_layers=1, head_dim=8)
    with pytest.raises(StrictDataclassError) as caught:
        HopeConfig(**base | {"layer_types": ["sparse_attention"]} | options)
    assert re.search(sentence, str(caught.value.__cause__))


def test_a_cache_of_another_layout():
    others = {}, {"sparse_compress_stride": 8}, {"sparse_window": 8}, {"conv_kernel_size": 2}
    models = [HopeForCausalLM(config_of(**FEW | options)) for options in others]
    ids = torch.tensor([[1, 2, 3]])
    cache = HopeCache(models[0].config)
    models[0](ids, cache=cache)
    with pytest.raises(ValueError, match="blocks of 8, strides of 4 .*, and this model's has .* strides of 8 "):
        models[1](ids, cache=cache)
    with pytest.raises(ValueError, match="convolutions of 4 tokens, and .* convolutions of 2 tokens"):
        models[3](ids, cache=cache)
    # what is read of the cache is the model's
    models[2](ids, cache=cache)


# of queries, keys and values made in tiles: block, rows of the convolution's tail, head width
QKV_BLOCK, TAIL, QKV_WIDTH = 8, 3, 4
QKV_SIZES = QkvSizes(heads=4, key_heads=2, epsilon=1e-6)


def earlier(padding_mask):
    """What a call of seven tokens has read."""
    return plan_slots(QKV_BLOCK, (2, 7), torch.device("cpu"), padding_mask=padding_mask).past


LAYOUTS = {
    "a text": {},
    "a text that goes on": {"past": earlier(None)},
    "rows of unequal history": {"past": earlier(torch.tensor([[0] * 3 + [1] * 4, [1] * 7]))},
    "padding": {"padding_mask": torch.tensor([[1] * 45, [0] * 5 + [1] * 40])},
    "documents": {"position_ids": torch.tensor([[*range(20), *range(25)], [*range(2), *range(43)]])},
}


@pytest.mark.parametrize("tile", [8, 16, 64])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_queries_keys_and_values_made_in_tiles_equal_plain_operations(monkeypatch, layout, tile):
    monkeypatch.setattr(sparse_reads, "_TIME_TILE", tile)
    plan = plan_slots(QKV_BLOCK, (2, 45), torch.device("cpu"), **layout)
    length = 45 if plan.valid is None else plan.valid.shape[1]
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    channels = (QKV_SIZES.heads + 2 * QKV_SIZES.key_heads) * QKV_WIDTH
    leaves = [random(2, length, channels), random(2, TAIL, channels)]
    leaves += [random(TAIL + 1, 1, 1, channels), random(QKV_WIDTH), random(QKV_WIDTH)]
    leaves = [leaf.requires_grad_() for leaf in leaves]
    angles = random(1, length, QKV_WIDTH), random(1, length, QKV_WIDTH)
    (whole,) = convolution_spans(plan, length, TAIL, length)
    weights = QkvWeights(*leaves[2:])
    expected = make_qkv(*leaves[:2], weights, angles, whole, QKV_SIZES)
    found = make_qkv_tiled(*leaves[:2], weights, angles, plan, QKV_SIZES)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-11)
    wanted = [random(*part.shape) for part in expected]
    for one, other in zip(*(torch.autograd.grad(made, leaves, wanted) for made in (found, expected)), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-11)
