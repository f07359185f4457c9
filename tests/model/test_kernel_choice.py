"""Which code computes: what `HOPE_KERNELS` says, what stands in the way, and what is counted."""

import importlib.util
from collections import Counter

import pytest
import torch

from hope_hf import HopeConfig, HopeForCausalLM
from hope_hf.model import memory_gpu
from hope_hf.model.backends import Kernel, choose
from hope_hf.model.sparse_branches import SparseSizes
from hope_hf.model.sparse_gpu import obstacle

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def operators():
    return "operators"


def chosen(asked, device, to_fla, to_triton):
    counted = Counter()
    kernels = {"fla": Kernel(lambda: "fla", lambda: to_fla), "triton": Kernel(lambda: "triton", lambda: to_triton)}
    return choose("memory_scan", asked, kernels, operators, counted, device)(), counted


@pytest.mark.parametrize("asked, device, to_fla, to_triton, expected", [
    ("auto", GPU, None, None, "fla"),
    ("auto", GPU, "it is Monday", None, "triton"),
    ("auto", GPU, "it is Monday", "it rains", "operators"),
    ("auto", CPU, None, None, "operators"),
    ("torch", GPU, None, None, "operators"),
    ("fla", CPU, None, "it rains", "fla"),
    ("triton", CPU, None, None, "triton"),
])  # fmt: skip
def test_what_runs(asked, device, to_fla, to_triton, expected):
    run, counted = chosen(asked, device, to_fla, to_triton)
    assert run == expected
    # torch's operators are no fallback where nothing else was to be expected
    is_fallback = expected == "operators" and to_fla
    assert counted == ({("memory_scan", "it is Monday; it rains"): 1} if is_fallback else {})


def test_a_fallback_from_kernels_that_were_asked_for_is_an_error():
    with pytest.raises(ValueError, match="HOPE_KERNELS=fla cannot compute the memory_scan: it is Monday. Set HOPE_K"):
        chosen("fla", GPU, "it is Monday", None)


def test_an_unknown_value(monkeypatch, tiny_config):
    monkeypatch.setenv("HOPE_KERNELS", "cuda")
    with pytest.raises(ValueError, match="HOPE_KERNELS=cuda is unknown: set it to auto, torch, fla or triton."):
        HopeForCausalLM(tiny_config())


OBSTACLES = {
    "fla, no GPU": ("fla", {}, torch.float32, "the model is on a CPU"),
    "fla, float64": ("fla", {}, torch.float64, "the model is float64"),
    "fla, the paper's rule": ("fla", {"memory_rule": "paper"}, torch.float32, "no kernels for memory_rule='paper'"),
    "fla, memories that remake": ("fla", {"memory_projections": ["k"]}, torch.float32, "for memory_projections"),
    "fla, wide heads": ("fla", {"head_dim": 272, "num_attention_heads": 1}, torch.float32, "wider than 256"),
    "triton, no GPU": ("triton", {"head_dim": 16}, torch.float32, "the model is on a CPU"),
    "triton, float64": ("triton", {}, torch.float64, "the model is float64"),
    "triton, the paper's rule": ("triton", {"memory_rule": "paper"}, torch.float32, "know memory_rule='paper'"),
    "triton, heads": ("triton", {"head_dim": 48}, torch.float32, "are 16, 32, 64 or 128 wide, not 48"),
}


@pytest.mark.parametrize("asked, options, dtype, reason", OBSTACLES.values(), ids=OBSTACLES)
def test_what_stands_in_the_way_of_a_model(monkeypatch, tiny_model, asked, options, dtype, reason):
    monkeypatch.setenv("HOPE_KERNELS", asked)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    model = tiny_model(dtype, **options)
    with pytest.raises(ValueError, match=f"HOPE_KERNELS={asked} cannot compute the memory_scan: .*{reason}"):
        model(torch.tensor([[1, 2, 3]]))


SPARSE_OBSTACLES = {
    "fla, no GPU": ("fla", {"sparse_block_size": 16}, torch.float32, "the model is on a CPU"),
    "fla, float64": ("fla", {}, torch.float64, "the model is float64"),
    "fla, blocks": ("fla", {"sparse_block_size": 24}, torch.float32, r"for sparse_block_size=24 \(16, 32, 64"),
    "triton": ("triton", {}, torch.float32, "HOPE has none of its own"),
}


@pytest.mark.parametrize("asked, options, dtype, reason", SPARSE_OBSTACLES.values(), ids=SPARSE_OBSTACLES)
def test_what_stands_in_the_way_of_sparse_attention(monkeypatch, tiny_model, asked, options, dtype, reason):
    monkeypatch.setenv("HOPE_KERNELS", asked)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    layers = {"layer_types": ["sparse_attention"] * 2, "sparse_compress_stride": 8, "sparse_window": 48}
    model = tiny_model(dtype, **{"sparse_block_size": 16} | layers | options)
    with pytest.raises(ValueError, match=f"HOPE_KERNELS={asked} cannot compute the sparse_attention: .*{reason}"):
        model(torch.tensor([[1, 2, 3]]))


def test_gradients_of_the_keys_of_earlier_calls_are_torchs():
    sizes, queries = SparseSizes(16, 8, 4, 16), torch.zeros(1, 1, 1, 4, 16)
    assert "no gradients of the keys of earlier calls" in obstacle(queries, 16, sizes)
    with torch.no_grad():
        assert "earlier calls" not in (obstacle(queries, 16, sizes) or "")


@pytest.mark.parametrize("asked, reason", [
    ("fla", r"flash-linear-attention is not installed \(pip install 'hope_hf\[gpu\]'\)"),
    ("triton", r"Triton is not installed \(pip install triton\)"),
])  # fmt: skip
def test_a_missing_library(monkeypatch, tiny_model, asked, reason):
    monkeypatch.setenv("HOPE_KERNELS", asked)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=reason):
        tiny_model(head_dim=16)(torch.tensor([[1, 2, 3]]))


@pytest.mark.parametrize("capability, triton, tilelang, refused", [
    ((9, 0), "3.6.0", False, True),
    ((9, 0), "3.6.0", True, False),
    ((9, 0), "3.7.1", False, False),
    ((9, 0), "3.8.0+git1", False, False),
    ((8, 0), "3.6.0", False, False),
])  # fmt: skip
def test_a_compiler_that_makes_wrong_gradients(monkeypatch, capability, triton, tilelang, refused):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(memory_gpu.importlib.metadata, "version", lambda name: triton)
    monkeypatch.setattr(memory_gpu.importlib.util, "find_spec", lambda name: "found" if tilelang else None)
    assert ("wrong gradients" in (memory_gpu._defect(GPU) or "")) == refused


def test_every_config_has_kernels_or_a_reason():
    """The default configuration is the one that kernels compute."""
    config = HopeConfig()
    assert config.memory_rule == "delta" and not config.memory_projections
