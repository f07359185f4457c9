"""The scan by flash-linear-attention's kernels against the plain scan in float64: reads, states, all gradients.

On a GPU as they are, else in Triton's interpreter.
"""

from functools import partial

import pytest
import torch
from interpreter import import_interpreted
from scans import TAPS, largest_error, plain_pieces, problem, ragged_pieces

from hope_hf.model.kernels_fla import scan_fla

pytestmark = [
    pytest.mark.kernels,
    # of the imports of torch's compiler
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Triton is not supported:UserWarning"),
]


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def interpreted():
    if DEVICE == "cpu":
        import_interpreted("fla.ops.gated_delta_rule")


def assert_fla_equals_plain(arguments, need_state=True, dtype=torch.float32, bound=1e-5):
    assert largest_error(partial(scan_fla, dtype=dtype), arguments, need_state, DEVICE) <= bound


@pytest.mark.parametrize("need_state", [True, False])
@pytest.mark.parametrize("chunk, seen", [(16, 0), (64, 3)])
def test_rows_that_are_cut_alike(chunk, seen, need_state):
    arguments = problem(plain_pieces(chunk, seen), made="", fresh=not seen)
    assert_fla_equals_plain(arguments, need_state)


@pytest.mark.parametrize("chunk", [8, 16])
def test_rows_with_padding_documents_and_unequal_history(chunk):
    # The convolution's tail of a document shorter than it begins with tokens of which nothing is read.
    spans = ragged_pieces(chunk, last=TAPS - 1)
    assert spans[0].tail_in is not None and not all(span.keeps.all() for span in spans[1:])
    assert_fla_equals_plain(problem(spans, made=""))


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter has no products of bfloat16")
@pytest.mark.parametrize("cut", [plain_pieces, ragged_pieces])
def test_operands_of_bfloat16(cut):
    assert_fla_equals_plain(problem(cut(64), made=""), need_state=False, dtype=torch.bfloat16, bound=2e-2)
