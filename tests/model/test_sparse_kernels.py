"""Sparse attention by flash-linear-attention's kernels against torch's operators in float64: reads, all gradients.

On a GPU as they are, else in Triton's interpreter.
"""

from functools import partial

import pytest
import torch
from interpreter import import_interpreted
from sparse_mixers import FEW, random_mixer, run, texts

from hope_hf.fast.sparse_reads import read_sparse_fused
from hope_hf.model import sparse_attention
from hope_hf.model.kernels_fla import read_selected_fla
from hope_hf.model.sparse_branches import SparseKeys, SparseSizes

pytestmark = [
    pytest.mark.kernels,
    # of the imports of torch's compiler
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Triton is not supported:UserWarning"),
    pytest.mark.filterwarnings("ignore:Flash Attention is not installed:ImportWarning"),
]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BLOCK, WIDTH = 16, 16


@pytest.fixture(autouse=True)
def interpreted():
    if DEVICE == "cpu":
        import_interpreted("fla.ops.nsa.parallel")


def problem(group: int, base: int, documents: bool, length: int = 45):
    """Arguments of the two, float64: what needs gradients, and the rest."""
    room = -(-(base + length) // BLOCK) * BLOCK
    shapes = [(2, 2, group, length, WIDTH), (2, 2, group, length, 3)]
    shapes += [(2, 2, room, WIDTH)] * 2 + [(2, 2, room // 8, WIDTH)] * 2
    generator = torch.Generator().manual_seed(0)
    leaves = [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]
    first = None
    if documents:
        first = torch.zeros(2, length, dtype=torch.long)
        first[0, 16:], first[1, 32:] = 16, 32
    return leaves, (base, first, SparseSizes(BLOCK, 8, 3, 16))


def outputs(read, leaves, rest, dtype, device):
    """Reads and the gradients of all leaves, in float64 on the CPU."""
    base, first, sizes = rest
    leaves = [leaf.detach().to(device, dtype).requires_grad_(leaf.requires_grad) for leaf in leaves]
    first = None if first is None else first.to(device)
    reads, chosen = read(*leaves[:2], SparseKeys(*leaves[2:]), base, first, sizes)
    if not reads.requires_grad:
        return [reads.double().cpu()], chosen.cpu()
    weights = torch.randn(reads.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    gradients = torch.autograd.grad((reads * weights.to(device, dtype)).sum(), leaves)
    return [part.detach().double().cpu() for part in (reads, *gradients)], chosen.cpu()


def assert_close(leaves, rest):
    expected, chosen = outputs(read_sparse_fused, leaves, rest, torch.float64, "cpu")
    read = partial(read_sparse_fused, selected_by=partial(read_selected_fla, dtype=torch.float32))
    found, also = outputs(read, leaves, rest, torch.float32, DEVICE)
    assert torch.equal(chosen, also)
    for one, other in zip(found, expected, strict=True):
        assert (one - other).norm() <= 1e-5 * other.norm()


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("group", [1, 3])
def test_reads_and_gradients(group, documents):
    assert_close(*problem(group, base=0, documents=documents))


def test_keys_of_earlier_calls():
    leaves, rest = problem(group=2, base=37, documents=False)
    with torch.no_grad():
        assert_close([leaf.detach() for leaf in leaves], rest)


def test_a_mixer_takes_them(monkeypatch):
    monkeypatch.setenv("HOPE_KERNELS", "fla")
    options = FEW | {"sparse_block_size": 16, "sparse_window": 32}
    mixer, hidden_states = random_mixer(**options).float().to(DEVICE), texts(2, 45).float().to(DEVICE)
    asked = []

    def read(*args, dtype):
        asked.append(dtype)
        return read_selected_fla(*args, dtype=dtype)

    monkeypatch.setattr(sparse_attention, "read_selected_fla", read)
    found = run(mixer, hidden_states)
    assert asked == [torch.float32]
    mixer.kernels = "torch"
    torch.testing.assert_close(found, run(mixer, hidden_states), rtol=1e-4, atol=1e-5)
