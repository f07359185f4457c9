"""The mixer on flash-linear-attention's kernels: launches, and bytes moved and kept; see `test_model_kernels.py`.

On a GPU as it is, else in Triton's interpreter.
"""

import pytest
import torch
from interpreter import import_interpreted
from torch._subclasses.fake_tensor import FakeTensorMode

from hope_hf import PRESETS, HopeConfig
from hope_hf.model.chunks import plan_chunks
from hope_hf.model.memory_mixer import SelfModifyingTitans

pytestmark = [
    pytest.mark.kernels,
    # of the imports of torch's compiler
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Triton is not supported:UserWarning"),
]


@pytest.fixture(autouse=True)
def interpreted():
    torch.manual_seed(0)
    if not torch.cuda.is_available():
        import_interpreted("fla.ops.gated_delta_rule", "fla.modules")


def test_launches_and_bytes_of_a_training_step(monkeypatch):
    # its peers load the library, which must have been made for the interpreter before
    from benchmarks import speed

    monkeypatch.setitem(PRESETS, "mid", PRESETS["mid"] | {"num_hidden_layers": 2})
    case = speed.Peers(speed.make_parser().parse_args(["bytes"]), "mid")
    hope, llama = (speed.traffic_of(case, name, 2048) for name in (speed.HOPE, speed.LLAMA))
    # the preset has 24 layers: 60 GB and 5.5 GiB
    assert hope.moved["elementwise"] <= 2 / 24 * 60e9
    assert hope.saved <= 2 / 24 * 5.5 * 2**30
    assert hope.number <= 2 * llama.number
    # every kernel is counted: of a layer three convolutions and norms each way, and more than ten of the scan
    assert hope.kernels > 2 * 2 * (3 + 3) + 2 * 10 and not llama.kernels


@pytest.mark.parametrize("options", [{}, {"memory_value_gate": False, "head_dim": 32}])
def test_what_a_mixer_keeps_is_what_is_planned(monkeypatch, options):
    from benchmarks.measuring import Traffic

    monkeypatch.setenv("HOPE_KERNELS", "fla")
    config = HopeConfig(vocab_size=8, hidden_size=1024, num_hidden_layers=1, num_memory_heads=32, **options)
    with FakeTensorMode():
        hidden_states, mixer = torch.zeros(2, 1024, 1024), SelfModifyingTitans(config, 0)
        with Traffic(mixer) as traffic:
            mixer(hidden_states, chunks=plan_chunks(config, (2, 1024), hidden_states.device))
    expected = SelfModifyingTitans.kept_by_kernels(config, 2, 1024, low=4, is_cast=False)
    assert traffic.saved - hidden_states.nbytes == pytest.approx(expected, rel=0.02)
