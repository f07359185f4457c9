"""The scan by flash-linear-attention's kernels against the plain scan in float64: reads, states, all gradients.

On a GPU as they are, else in Triton's interpreter.
"""

from functools import partial

import pytest
import torch
from interpreter import import_interpreted
from scans import TAPS, plain_pieces, problem, ragged_pieces, results

from hope_hf.model.delta_fla import scan_fla
from hope_hf.model.memory_scan import scan_plain

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


def in_float32(inputs, memories, state, pieces, leaves):
    """The same problem in float32, with leaves of its own."""
    narrow = {id(leaf): leaf.detach().float().to(DEVICE).requires_grad_() for leaf in leaves}

    def of(part):
        if isinstance(part, torch.Tensor):
            return narrow.get(id(part), part.to(DEVICE, part.dtype if part.dtype != torch.float64 else torch.float32))
        if isinstance(part, tuple):
            parts = [of(each) for each in part]
            return type(part)(*parts) if hasattr(part, "_fields") else tuple(parts)
        return part

    return of(inputs), of(memories), of(state), [of(piece) for piece in pieces], [narrow[id(leaf)] for leaf in leaves]


def assert_fla_equals_plain(arguments, need_state=True, dtype=torch.float32, bound=1e-5):
    expected = results(scan_plain, *arguments, need_state=need_state)
    found = results(partial(scan_fla, dtype=dtype), *in_float32(*arguments), need_state=need_state)
    for index, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        error = (ours.cpu() - theirs).norm() / theirs.norm()
        assert error <= bound, f"result {index}: {error:.1e}"


@pytest.mark.parametrize("need_state", [True, False])
@pytest.mark.parametrize("chunk, seen", [(16, 0), (64, 3)])
def test_rows_that_are_cut_alike(chunk, seen, need_state):
    arguments = problem(plain_pieces(chunk, seen), made="", fresh=not seen)
    assert_fla_equals_plain(arguments, need_state)


@pytest.mark.parametrize("chunk", [8, 16])
def test_rows_with_padding_documents_and_unequal_history(chunk):
    # The convolution's tail of a document shorter than it begins with tokens of which nothing is read.
    pieces = ragged_pieces(chunk, last=TAPS - 1)
    assert pieces[0].tail_in is not None and not all(piece.keeps.all() for piece in pieces[1:])
    assert_fla_equals_plain(problem(pieces, made=""))


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter has no products of bfloat16")
@pytest.mark.parametrize("cut", [plain_pieces, ragged_pieces])
def test_operands_of_bfloat16(cut):
    assert_fla_equals_plain(problem(cut(64), made=""), need_state=False, dtype=torch.bfloat16, bound=2e-2)


@pytest.fixture
def models(monkeypatch, tiny_model):
    """The same model twice: with the kernels, and with torch's operators."""
    built = []
    for kernels in ("fla", "torch"):
        monkeypatch.setenv("HOPE_KERNELS", kernels)
        built.append(tiny_model().to(DEVICE))
    return built


def assert_close(ours, theirs):
    assert (ours - theirs).norm() <= 1e-5 * theirs.norm()


DOCUMENTS = torch.cat([torch.arange(5), torch.arange(9), torch.arange(7)])[None].to(DEVICE)
PADDING = torch.tensor([[0] * 4 + [1] * 17, [1] * 21], device=DEVICE)


TEXTS = {"plain": {}, "documents": {"position_ids": DOCUMENTS}, "padding": {"attention_mask": PADDING}}


@pytest.mark.parametrize("options", TEXTS.values(), ids=TEXTS)
def test_a_model_trains_alike(models, options):
    rows = 2 if "attention_mask" in options else 1
    input_ids = torch.randint(64, (rows, 21), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    losses = []
    for model in models:
        loss = model(input_ids, labels=input_ids, **options).loss
        loss.backward()
        losses.append(loss)
    assert_close(*losses)
    for ours, theirs in zip(*(model.parameters() for model in models), strict=True):
        assert_close(ours.grad, theirs.grad)


def test_a_model_reads_in_pieces_and_generates_alike(models):
    input_ids = torch.randint(64, (2, 13), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    with torch.no_grad():
        whole = models[1](input_ids).logits
        cache, parts = None, []
        for part in input_ids.split([6, 1, 6], dim=1):
            out = models[0](part, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            parts.append(out.logits)
    assert_close(torch.cat(parts, dim=1), whole)
    mask = torch.ones(2, 13, dtype=torch.long, device=DEVICE)
    mask[0, :3] = 0
    made = [m.generate(input_ids, attention_mask=mask, max_new_tokens=8, do_sample=False) for m in models]
    assert torch.equal(*made)
