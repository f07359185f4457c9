"""Which code computes: what `HOPE_KERNELS` says, why kernels cannot run, what is counted, and the plain path."""

import importlib.util
from collections import Counter
from unittest.mock import Mock

import pytest
import torch
from mixers import MIXERS

from hope_hf import HopeConfig, HopeForCausalLM
from hope_hf.model import kernels_fla, loss, memory_mixer, memory_scan, sparse_attention
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
    with pytest.raises(ValueError, match="HOPE_KERNELS=fla cannot compute the memory_scan: it is Monday. Set HOPE_K"):
        chosen("fla", GPU, "it is Monday")


def test_an_unknown_value(monkeypatch, tiny_config):
    monkeypatch.setenv("HOPE_KERNELS", "cuda")
    with pytest.raises(ValueError, match="HOPE_KERNELS=cuda is unknown: set it to auto, torch, plain or fla."):
        HopeForCausalLM(tiny_config())


OBSTACLES = {
    "fla, no GPU": ("fla", {}, torch.float32, "the model is on a CPU"),
    "fla, float64": ("fla", {}, torch.float64, "the model is float64"),
    "fla, the paper's rule": ("fla", {"memory_rule": "paper"}, torch.float32, "no kernels for memory_rule='paper'"),
    "fla, memories that project": ("fla", {"memory_projections": ["k"]}, torch.float32, "for memory_projections"),
    "fla, wide heads": ("fla", {"head_dim": 272, "num_attention_heads": 1}, torch.float32, "wider than 256"),
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
    assert "no gradients of the keys of earlier calls" in selection_obstacle(queries, 16, sizes)
    with torch.no_grad():
        assert "earlier calls" not in (selection_obstacle(queries, 16, sizes) or "")


def test_a_missing_library(monkeypatch, tiny_model):
    monkeypatch.setenv("HOPE_KERNELS", "fla")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
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
    versions = Mock(return_value=triton)
    monkeypatch.setattr(kernels_fla.importlib.metadata, "version", versions)
    monkeypatch.setattr(kernels_fla.importlib.util, "find_spec", lambda name: "found" if tilelang else None)
    kernels_fla._defect.cache_clear()
    assert all(("wrong gradients" in (kernels_fla._defect(GPU) or "")) == refused for _ in range(2))
    # every layer asks, and the version is read from files
    assert versions.call_count == (capability == (9, 0))
    kernels_fla._defect.cache_clear()


def test_every_config_has_kernels_or_a_reason():
    """The default configuration is the one that kernels compute."""
    config = HopeConfig()
    assert config.memory_rule == "delta" and not config.memory_projections


def test_torchs_operators_recompute_chunks_and_kernels_none(monkeypatch, tiny_model):
    scanned, given, scan_spans = [], [], memory_scan._scan_spans

    def counted(*args):
        scanned.append(len(args[3]))
        return scan_spans(*args)

    def recorded(*args, **options):
        given.append(options)
        return memory_scan.scan_plain(*args, **options)

    def step():
        # five chunks of 4 tokens
        model = tiny_model(num_hidden_layers=1, recompute_chunks=2).train()
        model(torch.zeros(1, 20, dtype=torch.long), use_cache=False).logits.sum().backward()

    monkeypatch.setattr(memory_scan, "_scan_spans", counted)
    monkeypatch.setitem(FAST, "scan_delta", recorded)
    step()
    # the plain scan: forward, then backward
    assert given == [{"recompute": 2}] and scanned == [2, 2, 1] + [2, 2]
    monkeypatch.setattr(memory_mixer, "runs_torch", lambda *args: False)
    monkeypatch.setattr(memory_mixer, "choose", lambda *args: lambda *arguments: recorded(*arguments))
    step()
    assert given[1:] == [{}]


@pytest.mark.parametrize("kernels", ["plain", "auto"])
@pytest.mark.parametrize("options", MIXERS.values(), ids=MIXERS)
def test_the_model_alone_computes_what_it_does_with_fast_paths(monkeypatch, tiny_model, options, kernels):
    """As a copy of its code from the Hub does; `plain` also takes no kernel and no loss in parts."""
    input_ids = torch.randint(64, (2, 37), generator=torch.Generator().manual_seed(0))
    positions = torch.cat([torch.arange(15), torch.arange(22)]).expand(2, -1)

    def results():
        model = tiny_model(torch.float64, **options)
        found = model(input_ids, labels=input_ids, position_ids=positions, use_cache=False, skip_logits=True).loss
        found.backward()
        made = model.generate(input_ids[:, :9], max_new_tokens=5, do_sample=False)
        return made, found.detach(), *(parameter.grad for parameter in model.parameters())

    made, *fast = results()
    for name in [*FAST]:
        monkeypatch.delitem(FAST, name)
    if kernels == "plain":
        monkeypatch.delattr(memory_mixer, "choose")
        monkeypatch.delattr(sparse_attention, "choose")
        monkeypatch.delattr(loss, "linear_cross_entropy")
    monkeypatch.setenv("HOPE_KERNELS", kernels)
    made_plainly, *plain = results()
    assert torch.equal(made_plainly, made)
    torch.testing.assert_close(plain, fast, rtol=1e-9, atol=1e-12)
