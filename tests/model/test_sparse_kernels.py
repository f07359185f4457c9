"""Sparse attention by flash-linear-attention's kernels: which dtype it asks of them; see `test_model_kernels.py`.

On a GPU as they are, else in Triton's interpreter.
"""

import pytest
import torch
from interpreter import import_interpreted
from sparse_mixers import FEW, mixed, random_model, texts

from hope_hf.model import sparse_attention
from hope_hf.model.kernels_fla import read_selected_fla

pytestmark = [
    pytest.mark.kernels,
    # of the imports of torch's compiler
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Triton is not supported:UserWarning"),
    pytest.mark.filterwarnings("ignore:Flash Attention is not installed:ImportWarning"),
]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def interpreted():
    if DEVICE == "cpu":
        import_interpreted("fla.ops.nsa.parallel")


def test_a_mixer_takes_them(monkeypatch):
    outputs, chosen = [], []

    def read(*args, **options):
        chosen.append(options)
        return read_selected_fla(*args, **options)

    monkeypatch.setattr(sparse_attention, "read_selected_fla", read)
    for kernels in ("fla", "torch"):
        monkeypatch.setenv("HOPE_KERNELS", kernels)
        model = random_model(**FEW | {"sparse_block_size": 16, "sparse_window": 32}).float().to(DEVICE)
        outputs.append(mixed(model, texts(2, 45).float().to(DEVICE))[1])
    assert chosen == [{"dtype": torch.float32}]
    torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-5)
