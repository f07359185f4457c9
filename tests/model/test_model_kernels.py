"""Models under flash-linear-attention's kernels, in float32: as they are on a GPU, else in Triton's interpreter."""

import pytest
import torch
from interpreter import import_interpreted
from situations import Way, check

pytestmark = [
    pytest.mark.kernels,
    # of the imports of torch's compiler
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Triton is not supported:UserWarning"),
    pytest.mark.filterwarnings("ignore:Flash Attention is not installed:ImportWarning"),
]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Kernels(Way):
    dtype = torch.float32

    def __init__(self, kind):
        super().__init__(kind)
        self.model.to(DEVICE, self.dtype)

    def read(self, ids, cache=None, **call):
        return super().read(ids.to(DEVICE), cache, **{name: part.to(DEVICE) for name, part in call.items()})

    def compare(self, found, expected, name):
        # a gradient may be the small rest of large terms, of which float32 keeps few digits
        assert (found - expected).norm() <= 1e-4 * expected.norm() + 1e-4, name


@pytest.mark.parametrize("situation", ["uniform", "padded", "padding_last", "packed", "packed_in_calls", "resumed"])
@pytest.mark.parametrize("kind", ["static", "erase gate", "one chunk", "sparse, as in kernels"])
def test_kernels_read_the_document_alone(monkeypatch, kind, situation):
    if (kind, situation) == ("sparse, as in kernels", "resumed"):
        # gradients of the keys of earlier calls are torch's
        monkeypatch.setattr(Kernels, "has_gradients", False)
    if DEVICE == "cpu":
        import_interpreted("fla.ops.gated_delta_rule", "fla.modules", "fla.ops.nsa.parallel")
    monkeypatch.setenv("HOPE_KERNELS", "fla")
    check(Kernels(kind), kind, situation)


class Rounded(Kernels):
    dtype = torch.bfloat16

    def compare(self, found, expected, name):
        assert not name.startswith("document") or (found - expected).norm() <= 3e-2 * expected.norm(), name


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter has no products of bfloat16")
@pytest.mark.parametrize("situation", ["uniform", "padded"])
def test_bfloat16(monkeypatch, situation):
    monkeypatch.setenv("HOPE_KERNELS", "fla")
    check(Rounded("static"), "static", situation)
