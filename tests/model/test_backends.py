"""Which code computes: what `HOPE_KERNELS` says, why kernels cannot run, what is counted, and the plain path."""

import importlib.util
from collections import Counter
from unittest.mock import Mock

import pytest
import torch
from mixers import MIXED

from hope_hf import HopeForCausalLM
from hope_hf.model import kernels_fla, loss, memory_mixer, sparse_attention
from hope_hf.model.backends import FAST, Kernel, choose
from hope_hf.model.kernels_fla import selection_obstacle
from hope_hf.model.sparse_branches import SparseSizes

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def operators():
    return "operators"


def chosen(asked, device, to_fla):
    counted = Counter()
    kernel = Kernel(lambda: "fla", lambda: to_fla)
    return choose("memory_scan", asked, kernel, operators, counted, device)(), counted


@pytest.mark.parametrize("asked, device, to_fla, expected", [
    ("auto", GPU, None, "fla"),
    ("auto", GPU, "it is Monday", "operators"),
    ("auto", CPU, None, "operators"),
    ("torch", GPU, None, "operators"),
    ("fla", CPU, None, "fla"),
])  # fmt: skip
def test_what_runs(asked, device, to_fla, expected):
    run, counted = chosen(asked, device, to_fla)
    assert run == expected
    # torch's operators are no fallback where nothing else was to be expected
    is_fallback = expected == "operators" and to_fla
    assert counted == ({("memory_scan", "it is Monday"): 1} if is_fallback else {})


def test_a_fallback_from_kernels_that_were_asked_for_is_an_error():
    with pytest.raises(ValueError, match="HOPE_KERNELS=fla.*memory_scan.*it is Monday"):
        chosen("fla", GPU, "it is Monday")


def test_an_unknown_value(monkeypatch, tiny_config):
    monkeypatch.setenv("HOPE_KERNELS", "cuda")
    with pytest.raises(ValueError, match="HOPE_KERNELS=cuda.*auto, torch, plain or fla"):
        HopeForCausalLM(tiny_config())


SPARSE = dict(layer_types=["sparse_attention"] * 2, sparse_compress_stride=8, sparse_window=48, sparse_block_size=16)
# options, dtype, and words of the reason
OBSTACLES = {
    "no GPU": ({}, torch.float32, "memory_scan.*CPU"),
    "float64": ({}, torch.float64, "memory_scan.*float64"),
    "the paper's rule": ({"memory_rule": "paper"}, torch.float32, "memory_scan.*memory_rule='paper'"),
    "memories that project": ({"memory_projections": ["k"]}, torch.float32, "memory_scan.*memory_projections"),
    "wide heads": ({"head_dim": 272, "num_attention_heads": 1}, torch.float32, "memory_scan.*wider than 256"),
    "sparse, no GPU": (SPARSE, torch.float32, "sparse_attention.*CPU"),
    "sparse, float64": (SPARSE, torch.float64, "sparse_attention.*float64"),
    "sparse, blocks": (SPARSE | {"sparse_block_size": 24}, torch.float32, "sparse_attention.*sparse_block_size=24"),
}


@pytest.mark.parametrize("options, dtype, reason", OBSTACLES.values(), ids=OBSTACLES)
def test_what_stands_in_the_way_of_a_model(monkeypatch, tiny_model, options, dtype, reason):
    monkeypatch.setenv("HOPE_KERNELS", "fla")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    model = tiny_model(dtype, **options)
    with pytest.raises(ValueError, match=f"HOPE_KERNELS=fla.*{reason}"):
        model(torch.tensor([[1, 2, 3]]))


def test_gradients_of_the_keys_of_earlier_calls_are_torchs():
    sizes = SparseSizes(block=16, stride=8, top_k=4, window=16, heads=1, key_heads=1, epsilon=1e-6)
    queries = torch.zeros(1, 1, 1, 4, 16)
    assert "no gradients of the keys of earlier calls" in selection_obstacle(queries, 16, sizes)
    with torch.no_grad():
        assert "earlier calls" not in (selection_obstacle(queries, 16, sizes) or "")


def test_a_missing_library(monkeypatch, tiny_model):
    monkeypatch.setenv("HOPE_KERNELS", "fla")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"flash-linear-attention.*hope_hf\[gpu\]"):
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
    versions = Mock(return_value=triton)
    monkeypatch.setattr(kernels_fla.importlib.metadata, "version", versions)
    monkeypatch.setattr(kernels_fla.importlib.util, "find_spec", lambda name: "found" if tilelang else None)
    kernels_fla._defect.cache_clear()
    assert all(("wrong gradients" in (kernels_fla._defect(GPU) or "")) == refused for _ in range(2))
    # every layer asks, and the version is read from files
    assert versions.call_count == (capability == (9, 0))
    kernels_fla._defect.cache_clear()


def test_the_plain_path_takes_no_other(monkeypatch, tiny_model):
    """`test_equivalence.py` compares what they compute."""
    monkeypatch.setenv("HOPE_KERNELS", "plain")
    for name in [*FAST]:
        # levels of a block were once read the fast way
        if name != "forget_text":
            monkeypatch.setitem(FAST, name, lambda *_, name=name, **options: pytest.fail(f"{name} was called"))
    for module, name in ((memory_mixer, "choose"), (sparse_attention, "choose"), (loss, "linear_cross_entropy")):
        monkeypatch.delattr(module, name)
    model, ids = tiny_model(**MIXED), torch.arange(37)[None]
    model(ids, labels=ids, use_cache=False, skip_logits=True).loss.backward()
    model.generate(ids, max_new_tokens=3, do_sample=False)
