"""The scan with a backward pass written by hand: its inverses, and what it keeps.

`test_equivalence.py` compares it with the plain scan.
"""

import pytest
import torch
import torch.nn.functional as F

from hope_hf.fast.delta_scan import unit_lower_inverse


def inverse(lower):
    return torch.linalg.inv(torch.eye(lower.shape[-1], dtype=torch.float64) + lower)


@pytest.mark.parametrize("size", [1, 5, 8, 9, 16, 17, 48, 100, 128])
def test_inverses_of_triangular_matrices(size):
    torch.manual_seed(0)
    keys = F.normalize(torch.randn(3, size, 8, dtype=torch.float64), dim=-1)
    lower = (keys @ keys.mT * torch.rand(3, 1, size, dtype=torch.float64)).tril(-1)
    error = unit_lower_inverse(-lower) - inverse(lower)
    assert error.norm() <= 1e-11 * inverse(lower).norm()


@pytest.mark.parametrize("rate", [0.99, 1.0, 1.99])
@pytest.mark.parametrize("signs", ["equal", "alternating"])
def test_inverses_hold_in_float32_where_all_keys_are_equal(rate, signs):
    """The hardest case: powers of the matrix are far larger than its inverse, in which they cancel."""
    sign = torch.ones(64) if signs == "equal" else (-1.0) ** torch.arange(64)
    lower = (rate * sign[:, None] * sign).tril(-1).expand(2, -1, -1)
    error = unit_lower_inverse(-lower).double() - inverse(lower)
    # as a triangular solve
    assert error.abs().max() < 1e-4


def kept_bytes(tiny_model, **options):
    """Bytes that autograd keeps of a text of ten chunks."""
    kept = {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    model = tiny_model(num_hidden_layers=1, memory_chunk_size=16, **options)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.model(torch.arange(160)[None] % 64, use_cache=False)
    return sum(kept.values())


def test_what_is_recomputed_is_not_kept(monkeypatch, tiny_model):
    """The last `recompute_chunks` chunks keep all that their backward pass reads; with 0 all chunks do."""
    compiled = kept_bytes(tiny_model, recompute_chunks=0)
    monkeypatch.setenv("HOPE_KERNELS", "torch")
    one, five, whole = (kept_bytes(tiny_model, recompute_chunks=number) for number in (1, 5, 0))
    assert one < five < whole and whole - five == pytest.approx(5 / 4 * (five - one), rel=0.01)
    assert kept_bytes(tiny_model, recompute_chunks=10) == whole
    # the scan in C++ keeps errors and states alone
    assert compiled < one
