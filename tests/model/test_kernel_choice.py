"""Which code computes: what `HOPE_KERNELS` says, what stands in the way, and what is counted."""

from collections import Counter

import pytest
import torch

from hope_hf import HopeConfig, HopeForCausalLM
from hope_hf.model import delta_fla
from hope_hf.model.kernels import Kernel, choose

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def kernel():
    return "kernel"


def operators():
    return "operators"


def chosen(asked, device, reason):
    counted = Counter()
    run = choose("memory_scan", asked, {"fla": Kernel(kernel, lambda: reason)}, operators, counted, device)
    return run(), counted


@pytest.mark.parametrize("asked, device, reason, expected", [
    ("auto", GPU, None, "kernel"),
    ("auto", GPU, "it is Monday", "operators"),
    ("auto", CPU, None, "operators"),
    ("torch", GPU, None, "operators"),
    ("fla", CPU, None, "kernel"),
])  # fmt: skip
def test_what_runs(asked, device, reason, expected):
    run, counted = chosen(asked, device, reason)
    assert run == expected
    # torch's operators are no fallback where nothing else was to be expected
    assert counted == ({("memory_scan", reason): 1} if reason else {})


def test_a_fallback_from_kernels_that_were_asked_for_is_an_error():
    with pytest.raises(ValueError, match="HOPE_KERNELS=fla cannot compute the memory_scan: it is Monday. Set HOPE_K"):
        chosen("fla", GPU, "it is Monday")


def test_an_unknown_value(monkeypatch, tiny_config):
    monkeypatch.setenv("HOPE_KERNELS", "cuda")
    with pytest.raises(ValueError, match="HOPE_KERNELS=cuda is unknown: set it to auto, torch or fla."):
        HopeForCausalLM(tiny_config())


OBSTACLES = {
    "no GPU": ({}, torch.float32, "the model is on a CPU"),
    "float64": ({}, torch.float64, "the model is float64"),
    "the paper's rule": ({"memory_rule": "paper"}, torch.float32, "no kernels for memory_rule='paper'"),
    "memories that remake": ({"memory_projections": ["k"]}, torch.float32, "no kernels for memory_projections"),
    "wide heads": ({"head_dim": 272, "num_attention_heads": 1}, torch.float32, "wider than 256"),
}


@pytest.mark.parametrize("options, dtype, reason", OBSTACLES.values(), ids=OBSTACLES)
def test_what_stands_in_the_way_of_a_model(monkeypatch, tiny_model, options, dtype, reason):
    monkeypatch.setenv("HOPE_KERNELS", "fla")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    model = tiny_model(dtype, **options)
    with pytest.raises(ValueError, match=f"HOPE_KERNELS=fla cannot compute the memory_scan: .*{reason}"):
        model(torch.tensor([[1, 2, 3]]))


def test_a_missing_library(monkeypatch, tiny_model):
    monkeypatch.setenv("HOPE_KERNELS", "fla")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(delta_fla.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"flash-linear-attention is not installed \(pip install 'hope_hf\[gpu\]'\)"):
        tiny_model()(torch.tensor([[1, 2, 3]]))


@pytest.mark.parametrize("capability, triton, tilelang, refused", [
    ((9, 0), "3.6.0", False, True),
    ((9, 0), "3.6.0", True, False),
    ((9, 0), "3.7.1", False, False),
    ((9, 0), "3.8.0+git1", False, False),
    ((8, 0), "3.6.0", False, False),
])  # fmt: skip
def test_a_compiler_that_makes_wrong_gradients(monkeypatch, capability, triton, tilelang, refused):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(delta_fla.importlib.metadata, "version", lambda name: triton)
    monkeypatch.setattr(delta_fla.importlib.util, "find_spec", lambda name: "found" if tilelang else None)
    assert ("wrong gradients" in (delta_fla._defect(GPU) or "")) == refused


def test_every_config_has_kernels_or_a_reason():
    """The default configuration is the one that kernels compute."""
    config = HopeConfig()
    assert config.memory_rule == "delta" and not config.memory_projections
