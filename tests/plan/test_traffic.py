"""Bytes that a process sends in a step, and their time."""

from dataclasses import replace

import pytest

from hope_hf.plan.launch import STRATEGIES, Launch
from hope_hf.plan.traffic import traffic

P = 7e9
BF16 = {"gather_bytes": 2, "reduce_bytes": 2}


def launch(key: str, world: int = 8, parts: int | None = None) -> Launch:
    strategy = STRATEGIES[key]
    return Launch(strategy, world, (parts or world) if strategy.shared else 1, "bf16")


def test_7b_fully_sharded_on_8_ranks_in_bf16():
    sent = traffic(P, launch("full_shard"), **BF16)
    assert sent.total == pytest.approx(36.75e9)
    assert sent.seconds(600e9) == pytest.approx(0.061, abs=5e-4)
    # 200 Gbit/s are 25 GB/s, not 200.
    assert sent.seconds(200e9 / 8) == pytest.approx(1.47)


def test_kinds_of_traffic():
    one = P * 7 / 8 * 2
    assert traffic(P, launch("ddp"), **BF16).total == pytest.approx(2 * one)
    assert traffic(P, launch("shard_grad_op"), **BF16).total == pytest.approx(2 * one)
    assert traffic(P, launch("full_shard"), **BF16).gather == pytest.approx(2 * one)
    assert traffic(P, launch("ddp", 1)).total == 0


def test_accumulated_batches_gather_again_and_reduce_once():
    one = P * 7 / 8 * 2
    full = traffic(P, launch("full_shard"), accumulation=4, **BF16)
    assert (full.gather, full.reduce) == pytest.approx((8 * one, one))
    assert traffic(P, launch("full_shard"), 4, sync_each_batch=True, **BF16).reduce == pytest.approx(4 * one)
    assert traffic(P, launch("ddp"), 4, sync_each_batch=True, **BF16) == traffic(P, launch("ddp"), **BF16)
    assert traffic(P, launch("shard_grad_op"), 4, **BF16).gather == pytest.approx(4 * one)
    old = replace(launch("shard_grad_op"), strategy=replace(STRATEGIES["shard_grad_op"], engine="fsdp1"))
    assert traffic(P, old, 4, **BF16).gather == pytest.approx(one)
    # DeepSpeed keeps no whole gradients, and stage 2 all-reduces them.
    assert traffic(P, launch("zero2"), 4, **BF16).reduce == pytest.approx(4 * 2 * one)


def test_zero3_gathers_again_what_is_used_far_apart():
    for parameters, gathers in ((8e6, 1), (5e8, 1), (P, 2 - 0.5 / 7)):
        sent = traffic(parameters, launch("zero3"), **BF16)
        assert (sent.gather, sent.reduce) == pytest.approx((gathers * parameters * 7 / 8 * 2, parameters * 7 / 8 * 2))


def test_a_hybrid_gathers_inside_and_reduces_between():
    hybrid = traffic(P, launch("hybrid_shard", 16, 8), **BF16)
    alone = traffic(P, launch("full_shard", 8), **BF16)
    assert hybrid.gather == pytest.approx(alone.gather)
    # An all-reduce of an eighth of the gradients between two replicas.
    assert hybrid.reduce - alone.reduce == pytest.approx(2 * 1 / 2 * P / 8 * 2)
