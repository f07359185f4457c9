"""The scan with a backward written by hand against the plain scan and autograd: reads, state and all gradients."""

import weakref
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from mixers import build_mixer, run_fast
from scans import WIDTH, normal, plain_pieces, problem, ragged_pieces, results

from hope_hf.fast import delta_scan
from hope_hf.fast.delta_scan import scan_fused, unit_lower_inverse
from hope_hf.model.memory_scan import scan_plain

# which streams memories make
PROJECTIONS = {"static": "", "k": "k", "v": "v", "kv": "kv"}
# in chunks of 20 a span fills no whole number of the blocks that are inverted at once
CHUNKS = [8, 16, 20, 64]


def assert_same(ours, theirs):
    """To 1e-11 of each tensor's norm."""
    for index, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        assert a.shape == b.shape
        assert (a - b).norm() <= 1e-11 * b.norm(), f"result {index}: {(a - b).norm() / b.norm()}"


def assert_fused_equals_plain(*arguments, **options):
    plain = results(scan_plain, *arguments, **options)
    assert all(part.isfinite().all() for part in plain)
    assert_same(results(scan_fused, *arguments, **options), plain)


@pytest.mark.parametrize("made", PROJECTIONS.values(), ids=PROJECTIONS)
@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("seen", [0, 3], ids=["from the start", "mid-chunk"])
def test_rows_that_are_cut_alike(made, chunk, seen):
    assert_fused_equals_plain(*problem(plain_pieces(chunk, seen), made))


@pytest.mark.parametrize("made", PROJECTIONS.values(), ids=PROJECTIONS)
@pytest.mark.parametrize("chunk", CHUNKS)
def test_rows_with_padding_documents_and_unequal_history(made, chunk):
    spans = ragged_pieces(chunk)
    assert spans[0].tail_in is not None and not all(span.keeps.all() for span in spans[1:])
    assert_fused_equals_plain(*problem(spans, made))


@pytest.mark.parametrize("made", PROJECTIONS.values(), ids=PROJECTIONS)
@pytest.mark.parametrize("cut", [plain_pieces, ragged_pieces])
def test_a_text_that_begins_and_whose_state_nobody_needs(made, cut):
    assert_fused_equals_plain(*problem(cut(16), made, fresh=True), need_state=False)


@pytest.mark.parametrize("factors", [(1.0, 1.0, 1.0), (0.0, 0.0, 1.0), (0.5, 0.1, 1.0)], ids=str)
def test_memories_of_equal_of_no_and_of_three_rates(factors):
    assert_fused_equals_plain(*problem(ragged_pieces(16), factors=factors))


@pytest.mark.parametrize("cut", [plain_pieces, ragged_pieces])
def test_gates_of_what_is_erased(cut):
    assert_fused_equals_plain(*problem(cut(16), "", erases=False))


def test_a_head_that_forgets_within_a_token_overflows_nowhere():
    assert_fused_equals_plain(*problem(ragged_pieces(64), forgetting=60.0))


@pytest.mark.parametrize("field", delta_scan._Saved._fields)
def test_a_wrong_backward_would_be_seen(monkeypatch, field):
    """The control: whatever the backward pass reads, a millionth more of it is noticed."""
    backward = delta_scan._backward_span

    def wrong(inputs, weights, span, shape, kept, *rest):
        kept = kept._replace(**{field: getattr(kept, field) * (1 + 1e-6)})
        return backward(inputs, weights, span, shape, kept, *rest)

    monkeypatch.setattr(delta_scan, "_backward_span", wrong)
    with pytest.raises(AssertionError, match="result"):
        assert_fused_equals_plain(*problem(plain_pieces(16, seen=3)))


@pytest.mark.parametrize("cut", [plain_pieces, ragged_pieces])
@pytest.mark.parametrize("stride", [1, 2, 3])
def test_recomputed_pieces_give_the_same_gradients(cut, stride):
    arguments = problem(cut(8))

    for run in (scan_fused, scan_plain):
        assert_same(results(partial(run, recompute=stride), *arguments), results(run, *arguments))


def test_gradients_of_gradients_are_refused():
    """What the forward pass keeps would be taken for constants."""
    inputs, memories, state, spans, _ = problem(plain_pieces(8))
    reads, _ = scan_fused(inputs, memories, state, spans)
    (gradient,) = torch.autograd.grad(reads.square().sum(), inputs.query, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.square().sum().backward()


@pytest.fixture
def held(monkeypatch):
    """Of every span that was computed, a weak reference to its keys, values and queries after the convolution."""
    references = []
    mix = delta_scan._mix

    def recorded(*args):
        mixed, *rest = mix(*args)
        references.append(weakref.ref(mixed))
        return mixed, *rest

    monkeypatch.setattr(delta_scan, "_mix", recorded)
    return references


def alive(references):
    return [reference() is not None for reference in references]


@pytest.mark.parametrize("stride, kept", [(0, 5), (1, 1), (2, 2), (9, 5)])
def test_what_is_recomputed_is_not_kept(held, stride, kept):
    mixer = build_mixer(recompute_chunks=stride)
    output = run_fast(mixer, normal(1, 40, 16))
    assert output.grad_fn is not None and alive(held) == [False] * (5 - kept) + [True] * kept
    output.sum().backward()
    assert len(held) == 5 + (5 - kept) and not any(alive(held))


def test_nothing_is_kept_where_no_gradient_is_wanted(held, monkeypatch):
    """Not even until the end of the scan, or a long prompt would take as much memory as training on it."""
    most = []
    forward = delta_scan._forward_span

    def counted(*args, **options):
        most.append(sum(alive(held)))
        return forward(*args, **options)

    monkeypatch.setattr(delta_scan, "_forward_span", counted)
    mixer = build_mixer()
    with torch.no_grad():
        output = run_fast(mixer, normal(1, 40, 16))
    assert output.grad_fn is None and len(held) == 5
    # the span itself, and that before it until its variables are taken
    assert max(most) <= 2 and not any(alive(held))
    inputs, memories, state, spans, _ = problem(plain_pieces(8))
    held.clear()
    most.clear()
    with torch.no_grad():
        reads, after = scan_fused(inputs, memories, state, spans)
    assert reads.grad_fn is None and after.current[0].grad_fn is None
    assert max(most) <= 2 and not any(alive(held))


@pytest.mark.parametrize("size", [1, 5, 8, 9, 16, 17, 32, 48, 64, 100, 128])
def test_inverses_of_triangular_matrices(size):
    torch.manual_seed(0)
    keys = F.normalize(normal(3, size, WIDTH), dim=-1)
    lower = (keys @ keys.mT * torch.rand(3, 1, size, dtype=torch.float64)).tril(-1)
    expected = torch.linalg.inv(torch.eye(size, dtype=torch.float64) + lower)
    assert_same([unit_lower_inverse(-lower)], [expected])


@pytest.mark.parametrize("rate", [0.99, 1.0, 1.99])
@pytest.mark.parametrize("signs", ["equal", "alternating"])
def test_inverses_hold_in_float32_where_all_keys_are_equal(rate, signs):
    """The hardest case: powers of the matrix are far larger than its inverse, in which they cancel."""
    sign = torch.ones(64) if signs == "equal" else (-1.0) ** torch.arange(64)
    lower = (rate * sign[:, None] * sign).tril(-1).expand(2, -1, -1)
    expected = torch.linalg.inv(torch.eye(64, dtype=torch.float64) + lower)
    error = unit_lower_inverse(-lower).double() - expected
    # as a triangular solve
    assert error.abs().max() < 1e-4
