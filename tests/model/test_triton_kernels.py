"""The scan by our own Triton kernel of memories that project, against the plain scan in float64.

On a GPU as they are, else in Triton's interpreter.
"""

from functools import partial

import pytest
import torch
from interpreter import import_interpreted
from scans import TAPS, largest_error, plain_pieces, problem, ragged_pieces

from hope_hf.model.memory_fast import scan_fused
from hope_hf.model.memory_triton import scan_triton

pytestmark = [
    pytest.mark.kernels,
    # of the imports of torch's compiler
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Triton is not supported:UserWarning"),
]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# keys and values that memories project
MADE = ["k", "v", "kv"]

problem = partial(problem, width=16)


@pytest.fixture(autouse=True)
def interpreted():
    if DEVICE == "cpu":
        import_interpreted("fla.ops.gated_delta_rule")


def assert_triton_equals_plain(arguments, need_state=True, dtype=torch.float32, bound=1e-5):
    assert largest_error(partial(scan_triton, dtype=dtype), arguments, need_state, DEVICE, unread=False) <= bound


@pytest.mark.parametrize("need_state", [True, False])
@pytest.mark.parametrize("chunk, seen", [(16, 0), (64, 3)])
@pytest.mark.parametrize("made", MADE)
def test_rows_that_are_cut_alike(made, chunk, seen, need_state):
    assert_triton_equals_plain(problem(plain_pieces(chunk, seen), made=made, fresh=not seen), need_state)


@pytest.mark.parametrize("made", MADE)
def test_chunks_of_several_tiles(made):
    """One is open at the start and one at the end; the size is no power of two."""
    assert_triton_equals_plain(problem(plain_pieces(72, seen=30), made=made))


@pytest.mark.parametrize("chunk", [8, 40])
@pytest.mark.parametrize("made", MADE)
def test_rows_with_padding_documents_and_unequal_history(made, chunk):
    # The convolution's tail of a document shorter than it begins with tokens of which nothing is read.
    spans = ragged_pieces(chunk, last=TAPS - 1)
    assert spans[0].tail_in is not None and not all(span.keeps.all() for span in spans[1:])
    assert_triton_equals_plain(problem(spans, made=made))


def test_memories_of_several_rates():
    assert_triton_equals_plain(problem(plain_pieces(16, seen=3), factors=(0.3, 0.7, 1.0)))


@pytest.mark.parametrize("chunk", [128, 16])
def test_no_gradients(chunk):
    arguments = problem(ragged_pieces(chunk, last=TAPS - 1))
    with torch.no_grad():
        assert_triton_equals_plain(arguments)


def test_equal_keys_at_the_largest_rate():
    """A memory then turns over at every token: what powers of the matrix of the solve lose, is all there is."""
    inputs, memories, state, spans, leaves = problem(plain_pieces(64), factors=(1.0,) * 3)
    with torch.no_grad():
        inputs.key[:] = inputs.key[:, :1]
        inputs.rate[:] = 1.99
        inputs.log_retention[:] = 0.0
        memories.conv_weights[:-1] = 0.0
    arguments = inputs, memories, state, spans, leaves
    # float32 is not exact here: no worse than what runs on CPUs
    assert_triton_equals_plain(arguments, bound=largest_error(scan_fused, arguments))


def test_strong_forgetting():
    """Sums of log alpha overflow what an exponential can hold above the diagonal."""
    inputs, memories, state, pieces, leaves = problem(plain_pieces(64))
    with torch.no_grad():
        inputs.log_retention[:] = -60.0
    # The gradient of log alpha is of the size of e^-60, which flash-linear-attention's sums round away.
    leaves = [leaf for leaf in leaves if leaf is not inputs.log_retention]
    assert_triton_equals_plain((inputs, memories, state, pieces, leaves))


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter has no products of bfloat16")
@pytest.mark.parametrize("width", [16, 32, 64, 128])
@pytest.mark.parametrize("made", MADE)
@pytest.mark.parametrize("cut", [plain_pieces, ragged_pieces])
def test_operands_of_bfloat16(cut, made, width):
    arguments = problem(cut(64), made=made, width=width)
    assert_triton_equals_plain(arguments, need_state=False, dtype=torch.bfloat16, bound=3e-2)
