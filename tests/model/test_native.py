"""The fast paths in C++: that they run, what they equal, and what happens where they cannot be compiled.

`test_equivalence.py` compares them with the plain code in every situation of its table.
"""

import copy
import ctypes
import stat
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from mixers import random_ids

from hope_hf import HopeCache
from hope_hf.fast import delta_rows, gated_norm, native
from hope_hf.model.layers import gated_norm as norm_of_layers

LENGTH = 150


@pytest.fixture
def compiled_anew(monkeypatch):
    """The library is looked for again, now and after the test."""

    def forget():
        native._library.cache_clear()
        native.function.cache_clear()

    forget()
    # not optimised, so that it takes a second
    monkeypatch.setattr(native, "_FLAGS", ("-std=c++17", "-O0"))
    monkeypatch.setattr(native, "_TARGETS", ("-O0", "-O0"))
    yield monkeypatch
    monkeypatch.undo()
    forget()


def loss_and_gradients(model, length=LENGTH):
    ids = random_ids(2, length)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            # no factor is 1, and no bias 0
            parameter.mul_(1 + 0.2 * torch.rand(parameter.shape)).add_(0.02)
    model.zero_grad()
    output = model(ids, labels=ids)
    output.loss.backward()
    return [output.logits.detach()] + [parameter.grad.clone() for parameter in model.parameters()]


def in_operators(tiny_model, monkeypatch, dtype=torch.float32, **options):
    """What torch's operators compute."""
    with monkeypatch.context() as patch:
        patch.setenv("HOPE_KERNELS", "torch")
        return loss_and_gradients(tiny_model(dtype, **options))


def test_there_is_a_library_where_there_is_a_compiler():
    assert (native._library() is not None) == (native._compiler() is not None)


@pytest.mark.parametrize("name, arguments", [("scan", delta_rows._Arguments), ("norm", gated_norm._Arguments)])
def test_both_languages_have_one_structure(name, arguments):
    size = getattr(native._library(), f"hope_{name}_size")
    size.restype = ctypes.c_int64
    assert size() == ctypes.sizeof(arguments)


@pytest.mark.parametrize("options", [{}, dict(memory_value_gate=False), dict(memory_erase_bias=[-1.0, 1.0])])
def test_a_step_in_float64(tiny_model, monkeypatch, options):
    found = loss_and_gradients(tiny_model(torch.float64, **options))
    expected = in_operators(tiny_model, monkeypatch, torch.float64, **options)
    for own, other in zip(found, expected, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-11, atol=1e-13)
    # another order of the sums: the compiled code ran
    assert not torch.equal(found[0], expected[0])


@pytest.mark.parametrize("first", [1, 2, 40])
def test_gradients_go_back_into_the_call_before(tiny_model, monkeypatch, first):
    """Through memories and the convolutions' tails, also of a call that is shorter than a tail."""
    ids = random_ids(2, 70)
    results = []
    for kernels in ("auto", "torch"):
        monkeypatch.setenv("HOPE_KERNELS", kernels)
        model = tiny_model(torch.float64)
        cache = HopeCache(model.config)
        for part in (ids[:, :first], ids[:, first:50], ids[:, 50:]):
            loss = model(part, labels=part, cache=cache).loss
        loss.backward()
        results.append([parameter.grad for parameter in model.parameters() if parameter.grad is not None])
    torch.testing.assert_close(*results, rtol=1e-11, atol=1e-13)


def test_the_number_of_threads_changes_no_bit(tiny_model):
    model = tiny_model(num_memory_heads=5, hidden_size=80)
    threads = torch.get_num_threads()
    results = []
    try:
        for number in (1, 3):
            torch.set_num_threads(number)
            results.append(loss_and_gradients(copy.deepcopy(model)))
    finally:
        torch.set_num_threads(threads)
    torch.testing.assert_close(*results, rtol=0, atol=0)


def test_threads_share_the_parts(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    taken = []
    arguments = delta_rows._Arguments()
    native.run(lambda address, first, last: taken.append((first, last)), arguments, parts=7)
    native.run(lambda address, first, last: taken.append((first, last)), arguments, parts=7, least=4)
    assert sorted(taken) == [(0, 2), (0, 7), (2, 4), (4, 7)]


def test_float32_where_all_keys_are_equal(tiny_model):
    """The hardest case: at a rate near 2 the powers of the triangle are far larger than its inverse."""
    options = dict(memory_learning_rate_max=1.99, memory_learning_rate_bias=[9.0, 9.0], num_hidden_layers=1)
    ids = torch.ones(1, 200, dtype=torch.long)
    model = tiny_model(**options)
    with torch.no_grad():
        found = model(ids).logits.double()
        expected = model.double()(ids).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_number_that_is_not_finite_is_not_hidden(tiny_model):
    model = tiny_model()
    with torch.no_grad():
        model.model.layers[0].mixer.k_proj.weight[0, 0] = float("nan")
        assert model(random_ids(1, 40)).logits.isnan().all()


def test_widths_that_are_no_vectors_run_on_operators(tiny_model, monkeypatch):
    options = dict(head_dim=12, hidden_size=36)
    found = loss_and_gradients(tiny_model(**options))
    torch.testing.assert_close(found, in_operators(tiny_model, monkeypatch, **options), rtol=0, atol=0)


@pytest.mark.parametrize("is_transposed", [True, False])
def test_norm_and_gate(is_transposed):
    torch.manual_seed(0)
    shape = (2, 3, 5, 16) if is_transposed else (2, 5, 3, 16)
    tensors = [torch.randn(shape, dtype=torch.float64) for _ in range(2)] + [torch.rand(16, dtype=torch.float64)]
    grad = torch.randn(2, 5, 3, 16, dtype=torch.float64)
    results = []
    for kernels in ("auto", "plain"):
        leaves = [tensor.clone().requires_grad_() for tensor in tensors]
        x, gate, weight = leaves
        if is_transposed:
            x, gate = x.transpose(1, 2), gate.transpose(1, 2)
        normed = norm_of_layers(x, weight, 1e-6, gate, kernels)
        results.append([normed, *torch.autograd.grad(normed, leaves, grad)])
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-13)
    assert not torch.equal(results[0][0], results[1][0])


def test_norms_without_a_gate_have_torchs_bits():
    x, weight = torch.randn(2, 5, 64), torch.rand(64)
    expected = F.rms_norm(x, [64], weight, 1e-6)
    assert torch.equal(norm_of_layers(x, weight, 1e-6), expected)
    assert torch.equal(norm_of_layers(x.requires_grad_(), weight, 1e-6), expected)


def test_exponentials_are_exact_to_the_last_digits():
    """SiLU of the gate, whose norm is 1, over the numbers that float32 can tell from 0 and infinity."""
    gate = torch.linspace(-80, 80, 16 * 4096).view(1, -1, 16)
    ones = torch.ones_like(gate)
    found = gated_norm.gated_norm_compiled(ones, torch.ones(16), 0.0, gate)
    expected = F.silu(gate.double())
    assert ((found.double() - expected).abs() <= 4e-7 * expected.abs()).all()


def test_without_a_compiler(compiled_anew, tiny_model):
    compiled_anew.setattr(native, "_compiler", lambda: None)
    found = loss_and_gradients(tiny_model())
    torch.testing.assert_close(found, in_operators(tiny_model, compiled_anew), rtol=0, atol=0)


def program(folder: Path, body: str) -> str:
    """An executable shell script."""
    path = folder / "compiler"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_a_compiler_that_fails_is_named_once(compiled_anew, tiny_model, tmp_path, caplog):
    compiled_anew.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    body = '[ "$1" = --version ] && exit 0; echo "In file a:" >&2; echo "b: error: no disk" >&2; exit 1'
    compiled_anew.setenv("CXX", program(tmp_path, body))
    compiled_anew.setattr(native.logger, "propagate", True)
    found = loss_and_gradients(tiny_model())
    loss_and_gradients(tiny_model())
    torch.testing.assert_close(found, in_operators(tiny_model, compiled_anew), rtol=0, atol=0)
    warnings = [record.getMessage() for record in caplog.records if "torch's operators" in record.getMessage()]
    assert len(warnings) == 1 and warnings[0].endswith("compiler failed (b: error: no disk).")
    assert [*(tmp_path / "cache/hope_hf").iterdir()] == []


def test_a_compiler_that_names_the_processor_otherwise(compiled_anew, tiny_model, tmp_path):
    compiled_anew.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    compiled_anew.setattr(native, "_TARGETS", ("-march=native", "-mcpu=native"))
    body = 'case "$*" in *-march=native*) exit 1;; esac; exec c++ $(echo "$*" | sed s/-mcpu=native//)'
    compiled_anew.setenv("CXX", program(tmp_path, body))
    assert native._library() is not None


def test_the_cache_is_written_once_and_kept_by_processor(compiled_anew, tmp_path):
    compiled_anew.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = native._library()
    (file,) = (tmp_path / "hope_hf").iterdir()
    written = file.stat().st_mtime_ns
    native._library.cache_clear()
    assert native._library() is not first and file.stat().st_mtime_ns == written
    native._library.cache_clear()
    compiled_anew.setattr(native, "_processor", lambda: "another one")
    native._library()
    assert len([*(tmp_path / "hope_hf").iterdir()]) == 2


def test_a_cache_that_is_no_folder(compiled_anew, tmp_path):
    (tmp_path / "hope_hf").write_text("")
    compiled_anew.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert native._library() is not None
