"""Rows of sparse attention, and of operators that replaced kernels of a GPU."""

from collections import Counter

import torch

from hope_hf.training.watch import model_report
from hope_hf.training.watch.model_report import MixerReport

SIZES = dict(sparse_block_size=8, sparse_compress_stride=4, sparse_top_k=3, sparse_window=8)


def sparse_model(tiny_model):
    return tiny_model(layer_types=["sparse_attention", "sparse_attention"], **SIZES)


def ids(rows, length=40):
    return torch.randint(62, (rows, length), generator=torch.Generator().manual_seed(0))


def test_what_is_counted(tiny_model):
    model = sparse_model(tiny_model)
    mixer, seen = model.model.layers[0].mixer, []
    mixer.branch_gates = lambda x, gates=mixer.branch_gates: seen.append(gates(x)) or seen[-1]
    report = MixerReport(model)
    padding = torch.ones(2, 40, dtype=torch.long)
    padding[0, :7] = 0
    with report.forward(True):
        model(ids(2), attention_mask=padding)
    rows, gates = report.rows(), seen[0][padding.bool()]
    tokens, heads = 73, mixer.config.num_key_value_heads
    assert rows["sparse/0/rows"] == tokens * heads
    shares = gates / gates.sum(-1, keepdim=True)
    entropy = torch.distributions.Categorical(shares).entropy()
    for name, value in (
        ("gate_entropy_mean", entropy.mean()), ("gate_entropy_min", entropy.min()), ("gate_max", shares.max()),
        ("share_window", shares[..., 2].mean()), ("gate_collapse_fraction", 0.0),
    ):  # fmt: skip
        assert abs(rows[f"sparse/0/{name}"] - float(value)) < 1e-6, name
    # a token of block y reads min(y + 1, 3) blocks
    blocks = [min(t // 8 + 1, 3) for length in (33, 40) for t in range(length)]
    assert rows["sparse/0/k_max"] == 3 and abs(rows["sparse/0/k_mean"] - sum(blocks) / tokens) < 1e-9
    assert abs(rows["sparse/0/k_at_max_percent"] - 100 * blocks.count(3) / tokens) < 1e-9
    # own block, the one before and the first: distances in blocks of 8
    away = sorted(8 * d for length in (33, 40) for t in range(length) for d in {0, min(1, t // 8), t // 8})
    assert rows["sparse/0/selected_distance_median"] == away[(len(away) + 1) // 2 - 1]
    assert rows["sparse/0/selected_distance_p95"] == away[-(-len(away) * 95 // 100) - 1]
    assert rows["sparse/all/rows"] == 2 * tokens * heads


def test_what_is_computed_again_in_the_backward_pass_counts_once(tiny_model):
    model = sparse_model(tiny_model).train()
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable({"use_reentrant": False})
    report = MixerReport(model)
    with report.forward(True):
        loss = model(ids(2), labels=ids(2)).loss
    loss.backward()
    assert report.rows()["sparse/0/rows"] == 80 * model.config.num_key_value_heads


def test_a_collapsed_gate_is_said_once(tiny_model, monkeypatch):
    monkeypatch.setattr(model_report, "STEPS", 3)
    model = sparse_model(tiny_model)
    mixer = model.model.layers[1].mixer
    report, said = MixerReport(model), []
    for step in range(8):
        # open in the second step: what was counted before begins again
        gates = torch.tensor([0.98, 0.01, 0.01] if step != 1 else [0.4, 0.3, 0.3])
        mixer.branch_gates = lambda x, gates=gates: gates.expand(*x.shape[:2], mixer.config.num_attention_heads, 3)
        with report.forward(True):
            model(ids(1))
        report.rows()
        said.append(report.warnings())
    assert [bool(sentences) for sentences in said] == [False] * 4 + [True] + [False] * 3
    assert said[4] == [
        "sparse attention of layer 1 reads one branch: in the last 3 logged steps the largest of most gates had "
        "more than 0.95 of their sum (sparse/1/gate_collapse_fraction)"
    ]


NAME = "kernel/memory_scan/fallbacks"


def test_those_of_all_processes_and_layers_count(monkeypatch, tiny_model):
    model = tiny_model()
    report = model_report.KernelReport(model)
    mixers = [layer.mixer for layer in model.model.layers]
    other = Counter({("memory_scan", "another GPU"): 5})
    monkeypatch.setattr(model_report, "gather_object", lambda own: [*own, other])
    assert report.table() == ""
    for mixer in mixers:
        mixer.kernel_fallbacks["memory_scan", "it rains"] += 1
    assert report.rows() == {NAME: 7}
    mixers[0].kernel_fallbacks["memory_scan", "it rains"] += 1
    assert report.rows() == {NAME: 1}
    lines = report.table().splitlines()
    assert lines[-2:] == ["| memory_scan | 5 | another GPU |", "| memory_scan | 3 | it rains |"]
