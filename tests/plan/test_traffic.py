"""Bytes that a process sends in a step, and their time."""

from dataclasses import replace

import pytest

from hope_hf.plan.launch import STRATEGIES, Launch
from hope_hf.plan.traffic import traffic

P = 7e9
# what a process sends of P numbers of 2 bytes, gathered or scattered among 8
ONE = P * 7 / 8 * 2


def sent(key: str, accumulation: int = 1, world: int = 8, parts: int | None = None, parameters=P, **options):
    strategy = STRATEGIES[key]
    launch = Launch(strategy, world, (parts or world) if strategy.shared else 1, "bf16")
    return traffic(parameters, launch, accumulation, gather_bytes=2, reduce_bytes=2, **options)


def test_7b_fully_sharded_on_8_ranks_in_bf16():
    full = sent("full_shard")
    assert (full.gather, full.total) == pytest.approx((2 * ONE, 36.75e9))
    # 200 Gbit/s are 25 GB/s, not 200
    assert (full.seconds(600e9), full.seconds(200e9 / 8)) == (pytest.approx(0.061, abs=5e-4), pytest.approx(1.47))


def test_other_strategies():
    assert sent("ddp").total == sent("ddp", 4, sync_each_batch=True).total == pytest.approx(2 * ONE)
    assert sent("shard_grad_op").total == pytest.approx(2 * ONE)
    assert sent("ddp", world=1).total == 0


def test_accumulated_batches_gather_again_and_reduce_once():
    full = sent("full_shard", 4)
    assert (full.gather, full.reduce) == pytest.approx((8 * ONE, ONE))
    assert sent("full_shard", 4, sync_each_batch=True).reduce == pytest.approx(4 * ONE)
    assert sent("shard_grad_op", 4).gather == pytest.approx(4 * ONE)
    old = Launch(replace(STRATEGIES["shard_grad_op"], engine="fsdp1"), 8, 8, "bf16")
    assert traffic(P, old, 4, gather_bytes=2).gather == pytest.approx(ONE)
    # DeepSpeed keeps no whole gradients, and stage 2 all-reduces them
    assert sent("zero2", 4).reduce == pytest.approx(4 * 2 * ONE)


def test_zero3_gathers_again_what_is_used_far_apart():
    for parameters, gathers in ((5e8, 1), (P, 2 - 0.5 / 7)):
        zero3 = sent("zero3", parameters=parameters)
        part = parameters * 7 / 8 * 2
        assert (zero3.gather, zero3.reduce) == pytest.approx((gathers * part, part))


def test_a_hybrid_gathers_inside_and_reduces_between():
    hybrid, alone = sent("hybrid_shard", world=16, parts=8), sent("full_shard")
    assert hybrid.gather == pytest.approx(alone.gather)
    # an all-reduce of an eighth of the gradients between two replicas
    assert hybrid.reduce - alone.reduce == pytest.approx(2 * 1 / 2 * P / 8 * 2)
