"""Models of every mixer, documents, and the situations in which they are read; see `test_equivalence.py`."""

import copy
from functools import cache
from itertools import pairwise

import pytest
import torch
from torch.nn import functional as F

from hope_hf import HopeCache, HopeConfig, HopeForCausalLM

MEMORY, FULL, WINDOW, SPARSE = "hope_memory", "full_attention", "window_attention", "sparse_attention"
RETAINING = "retaining_attention"
SHORT_SPARSE = dict(sparse_block_size=4, sparse_compress_stride=2, sparse_top_k=3, sparse_window=4)
# what a model of one layer has, the kinds of its mixers among it
MIXERS = {
    "static": {},
    "k": dict(memory_projections=["k"], memory_chunk_size=8),
    "v": dict(memory_projections=["v"], projection_memory_rate=0.5, memory_chunk_size=1),
    "k and v": dict(memory_projections=["k", "v"], memory_learning_rate_max=1.99),
    "erase gate": dict(memory_erase_bias=[-3.0, 3.0]),
    "no value gate": dict(memory_value_gate=False, memory_projections=["k"], conv_kernel_size=1),
    "one chunk": dict(memory_chunk_size=64, recompute_chunks=0, num_memory_heads=3, conv_kernel_size=3),
    "forgets at once": dict(retention_bias=[-60.0, 3.0], memory_projections=["k", "v"], memory_chunk_size=16),
    "frozen projections": dict(projection_memory_rate=0.0, memory_projections=["k", "v"]),
    "paper": dict(memory_rule="paper", memory_projections=["k", "v"]),
    "paper, static": dict(memory_rule="paper", recompute_chunks=1),
    "paper, two layers": dict(memory_rule="paper", memory_depth=2, memory_projections=["v"]),
    "full": dict(layer_types=[FULL], num_attention_heads=4, num_key_value_heads=2, use_qk_norm=True),
    "window": dict(layer_types=[WINDOW], sliding_window=4, attention_sinks=2, use_qk_norm=True),
    "window, many sinks": dict(layer_types=[WINDOW], sliding_window=3, attention_sinks=6, attention_bias=True),
    "window alone": dict(layer_types=[WINDOW], sliding_window=5, num_attention_heads=4, num_key_value_heads=2),
    "retaining": dict(layer_types=[RETAINING], sliding_window=4, attention_sinks=2, retained_block_size=4)
    | dict(num_attention_heads=4, num_key_value_heads=2, retained_tokens=[[3, 2]]),
    "retaining, short reach": dict(layer_types=[RETAINING], sliding_window=3, attention_sinks=0)
    | dict(retained_block_size=5, retained_tokens=[[2, 4]], max_position_embeddings=16),
    "retaining, sinks": dict(layer_types=[RETAINING], sliding_window=1, attention_sinks=3)
    | dict(retained_block_size=3, retained_tokens=[[1, 6]], max_position_embeddings=11),
    "sparse": dict(layer_types=[SPARSE], num_attention_heads=4, num_key_value_heads=2) | SHORT_SPARSE,
    "sparse, two blocks": dict(layer_types=[SPARSE]) | SHORT_SPARSE | dict(sparse_top_k=2, sparse_compress_stride=4),
    "sparse, as in kernels": dict(layer_types=[SPARSE], head_dim=16, num_attention_heads=2, num_key_value_heads=1)
    | dict(sparse_block_size=16, sparse_compress_stride=8, sparse_top_k=2, sparse_window=16),
    "hybrid": dict(layer_types=[MEMORY, FULL], memory_projections=["k", "v"]),
    "sparse hybrid": dict(layer_types=[SPARSE, MEMORY]) | SHORT_SPARSE,
    "window hybrid": dict(layer_types=[WINDOW, MEMORY], sliding_window=4, attention_sinks=1),
    "retaining hybrid": dict(layer_types=[WINDOW, RETAINING, MEMORY], sliding_window=4, attention_sinks=1)
    | dict(retained_block_size=7, retained_tokens=[[3, 1]]),
    "levels": dict(level_periods=[1, 2], level_intermediate_sizes=[24, 16], mlp_bias=True, hidden_act="gelu"),
    "levels side by side": dict(level_periods=[1, 2], level_intermediate_sizes=[24, 16], level_variant="independent"),
}
VOCABULARY, LENGTH = 32, 24


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def build(kind: str) -> HopeForCausalLM:
    """A model whose parameters are all spread, so that no factor hides behind an initial 0 or 1."""
    options = dict(head_dim=8, num_memory_heads=2, num_attention_heads=2, memory_chunk_size=5, recompute_chunks=2)
    options |= MIXERS[kind]
    layers = len(options.get("layer_types", [MEMORY]))
    torch.manual_seed(0)
    config = HopeConfig(vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=layers, **options)
    model = HopeForCausalLM(config).double().eval()
    with torch.no_grad():
        for seed, parameter in enumerate(model.parameters()):
            parameter.add_(0.3 * draw(*parameter.shape, seed=seed))
    return model


TEXTS = torch.randint(1, VOCABULARY, (4, LENGTH), generator=torch.Generator().manual_seed(0))
# the first two begin alike
TEXTS[1, :9] = TEXTS[0, :9]
DOCUMENTS = [TEXTS[0], TEXTS[1], TEXTS[2, :17], TEXTS[2, 17:22], TEXTS[3, :2]]
# of the loss, so that each logit counts differently
WEIGHTS = [draw(len(document), VOCABULARY, seed=index) for index, document in enumerate(DOCUMENTS)]


class Way:
    """A model that reads by one way; caches of its own kind."""

    has_gradients = True

    def __init__(self, kind: str):
        self.model = build(kind)

    def new_cache(self):
        return HopeCache(self.model.config)

    def read(self, ids, cache=None, **call):
        """Logits [B, T, V]; `call` has a mask of all columns so far, positions of these, or neither."""
        return self.model(ids, cache=cache, **call).logits

    def compare(self, found, expected, name):
        error, size = (found - expected).norm(), expected.norm()
        assert error <= 1e-11 * size + 1e-13, f"{name}: {error} of {size}"


# A situation yields what was read: a document's number, the slice of its tokens, and their logits.


def uniform(way):
    logits = way.read(TEXTS[:2])
    for row in range(2):
        yield row, slice(0, LENGTH), logits[row]


def row_of(document, columns, length):
    """A document's tokens in these columns of a row, and the row's mask."""
    row, mask = torch.zeros(2, length, dtype=torch.long)
    row[columns], mask[columns] = DOCUMENTS[document][: len(columns)], 1
    return row, mask


def in_calls(way, memory, ids, mask, cuts):
    """Logits of rows with padding that are read in calls, which end at `cuts`."""
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    parts = []
    for start, stop in pairwise((0, *cuts)):
        call = dict(attention_mask=mask[:, :stop], position_ids=positions[:, start:stop])
        parts.append(way.read(ids[:, start:stop], memory, **call))
    return torch.cat(parts, dim=1)


def padded(way):
    """In front, and in the midst of a text; a row is padding alone in the first call, and ages are unequal then."""
    columns_of = {0: torch.arange(LENGTH), 2: torch.arange(7, LENGTH), 3: torch.tensor([3, 4, 9, 17, 22])}
    rows = [row_of(document, columns, LENGTH) for document, columns in columns_of.items()]
    ids, mask = map(torch.stack, zip(*rows, strict=True))
    logits = in_calls(way, way.new_cache(), ids, mask, (6, 16, 21, LENGTH))
    for row, (document, columns) in enumerate(columns_of.items()):
        yield document, slice(0, len(columns)), logits[row, columns]


def padding_last(way):
    """A short row's next tokens come after calls in which it was padding alone, as all rows are in the last."""
    lengths = {0: 12, 2: 3, 3: 1}
    longest, more = 14, 4
    rows = []
    for document, length in lengths.items():
        columns = torch.cat([torch.arange(length), torch.arange(longest, longest + more)])
        rows.append(row_of(document, columns, longest + more))
    ids, mask = map(torch.stack, zip(*rows, strict=True))
    logits = in_calls(way, way.new_cache(), ids, mask, (4, 12, longest, longest + more))
    for row, (document, length) in enumerate(lengths.items()):
        yield document, slice(0, length), logits[row, :length]
        yield document, slice(length, length + more), logits[row, longest:]


PACKED = torch.stack([TEXTS[0], torch.cat([DOCUMENTS[3], DOCUMENTS[2], DOCUMENTS[4]])])
POSITIONS = torch.stack([torch.arange(LENGTH), torch.cat([torch.arange(5), torch.arange(17), torch.arange(2)])])


def unpacked(logits):
    yield 0, slice(0, LENGTH), logits[0]
    for document, part in zip((3, 2, 4), logits[1].split([5, 17, 2]), strict=True):
        yield document, slice(0, len(part)), part


def packed(way):
    yield from unpacked(way.read(PACKED, position_ids=POSITIONS))


def packed_in_calls(way):
    """Documents that begin in a later call, within it and with it."""
    memory, parts = way.new_cache(), []
    for start, stop in ((0, 3), (3, 11), (11, 22), (22, LENGTH)):
        parts.append(way.read(PACKED[:, start:stop], memory, position_ids=POSITIONS[:, start:stop]))
    yield from unpacked(torch.cat(parts, dim=1))


def resumed(way):
    memory = way.new_cache()
    logits = torch.cat([way.read(part, memory) for part in TEXTS[:2].split([2, 9, 1, 12], dim=1)], dim=1)
    for row in range(2):
        yield row, slice(0, LENGTH), logits[row]


@torch.no_grad()
def forks(way):
    """A copy, a state that was rolled back to, and rows in another order go on as the text that they have read."""
    memory = way.new_cache()
    way.read(torch.stack([DOCUMENTS[0][:9], DOCUMENTS[2][:9]]), memory)
    before, fork, chosen = memory.snapshot(), copy.deepcopy(memory), copy.deepcopy(memory)
    way.read(TEXTS[2:, :7], memory)
    yield 0, slice(9, LENGTH), way.read(TEXTS[[0, 3], 9:], fork)[0]
    memory.rollback(before)
    later = torch.stack([DOCUMENTS[0][9:17], DOCUMENTS[2][9:]])
    for document, logits in zip((0, 2), way.read(later, memory), strict=True):
        yield document, slice(9, 17), logits
    chosen.reorder_cache(torch.tensor([1, 0, 0]))
    later = torch.stack([DOCUMENTS[2][9:], DOCUMENTS[0][9:17], DOCUMENTS[1][9:17]])
    for document, logits in zip((2, 0, 1), way.read(later, chosen), strict=True):
        yield document, slice(9, 17), logits


def ages(way):
    """Caches of unequal age are joined, read on as one batch, and go apart again."""
    lengths = {0: 9, 3: 4, 2: 15}
    caches, follow = [], []
    for document, length in lengths.items():
        cache_of_one = way.new_cache()
        way.read(DOCUMENTS[document][None, :length], cache_of_one)
        caches.append(cache_of_one)
        follow.append(DOCUMENTS[document][length : length + 1])
    batch, mask = HopeCache.joined(caches)
    mask = F.pad(mask, (0, 1), value=1)
    logits = way.read(torch.stack(follow), batch, attention_mask=mask)
    parts = batch.split(mask)
    for row, (document, length) in enumerate(lengths.items()):
        yield document, slice(length, length + 1), logits[row]
        rest = DOCUMENTS[document][None, length + 1 :]
        if rest.numel():
            yield document, slice(length + 1, len(DOCUMENTS[document])), way.read(rest, parts[row])[0]


SITUATIONS = {
    function.__name__: function
    for function in (uniform, padded, padding_last, packed, packed_in_calls, resumed, forks, ages)
}


@cache
def alone(kind):
    """The plain model's parameters, and the logits of each document, read alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOPE_KERNELS", "plain")
        model = build(kind)
    return list(model.parameters()), [model(document[None], use_cache=False).logits[0] for document in DOCUMENTS]


def check(way, kind, situation):
    """Logits of all that a situation reads, and the gradients of all parameters for a weighting of them."""
    parameters, expected = alone(kind)
    ours = theirs = torch.zeros((), dtype=torch.float64)
    pairs = {}
    with torch.set_grad_enabled(way.has_gradients):
        for document, part, logits in SITUATIONS[situation](way):
            wanted, logits = expected[document][part], logits.double().cpu()
            pairs[f"document {document}, {part}"] = logits, wanted
            ours = ours + (logits * WEIGHTS[document][part]).sum()
            theirs = theirs + (wanted * WEIGHTS[document][part]).sum()
    if ours.requires_grad:
        options = dict(materialize_grads=True, allow_unused=True)
        found = torch.autograd.grad(ours, list(way.model.parameters()), **options)
        needed = torch.autograd.grad(theirs, parameters, retain_graph=True, **options)
        for (name, _), *gradients in zip(way.model.named_parameters(), found, needed, strict=True):
            pairs[name] = gradients
    for name, (one, other) in pairs.items():
        way.compare(one.double().cpu(), other, name)
