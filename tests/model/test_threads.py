"""One model in several threads, each with a cache of its own: each gets what it would get alone.

The threads take turns at fixed places, so that each test meets the same moment every time.
"""

from concurrent.futures import ThreadPoolExecutor

import torch
from mixers import HYBRID, MIXED, random_ids

from hope_hf import HopeCache, frozen_memories

LEARNS = dict(periods=[8, 16], rate=0.05, drift=0.5, gate=False, brake=0.0)


def in_another_thread(job):
    """The result of `job()` in a new thread, while this one waits."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(job).result(timeout=60)


def learned(model, ids) -> torch.Tensor:
    """All differences that a text teaches."""
    cache = HopeCache(model.config)
    model.learn(ids, cache=cache)
    return torch.cat([delta.flatten() for delta in cache.levels.deltas.values()])


def trained(model, ids) -> list[torch.Tensor]:
    """The gradients of a training step."""
    model.zero_grad()
    model(ids, labels=ids).loss.backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def while_it_learns(model, job):
    """Let the next piece wait before the last norm for `job()` in another thread; returns a list of its result."""
    results = []

    def pause(module, inputs):
        handle.remove()
        results.append(in_another_thread(job))

    handle = model.model.norm.register_forward_pre_hook(pause)
    return results


def test_a_training_step_and_a_second_text_beside_one_that_is_learned(tiny_model):
    model = tiny_model(level_learning=LEARNS, **MIXED)
    first, second = random_ids(1, 40), random_ids(1, 40, seed=2)
    alone, beside, gradients = learned(model, first), learned(model, second), trained(model, second)

    def others():
        # the same moment for both, within a piece of the first text
        return learned(model, second), trained(model, second)

    results = while_it_learns(model, others)
    assert torch.equal(learned(model, first), alone)
    torch.testing.assert_close(results[0], (beside, gradients), rtol=0, atol=0)
    assert all(parameter.requires_grad for parameter in model.parameters())
    # learning wrote none
    torch.testing.assert_close([parameter.grad for parameter in model.parameters()], gradients, rtol=0, atol=0)


def test_a_thread_that_reads_frozen_freezes_no_other(tiny_model):
    model, ids = tiny_model(**HYBRID), random_ids(1, 30)
    live = model(ids).logits
    with frozen_memories(model):
        frozen = model(ids).logits
        assert torch.equal(in_another_thread(lambda: model(ids).logits), live)
        assert torch.equal(model(ids, freeze_memories=False).logits, live)
        with frozen_memories(model):
            pass
        assert torch.equal(model(ids).logits, frozen), "the inner context ended the outer one"
    assert torch.equal(model(ids).logits, live) and not torch.equal(live, frozen)
    assert torch.equal(model(ids, freeze_memories=True).logits, frozen)


def test_blocks_below_the_first_that_learns_keep_no_graph(tiny_model):
    model, ids = tiny_model(level_learning=LEARNS, num_hidden_layers=4), random_ids(1, 8)
    had_graph = []
    for block in model.model.layers:
        block.register_forward_hook(lambda _, __, output: had_graph.append(output[0].requires_grad))
    model.learn(ids, cache=HopeCache(model.config))
    assert had_graph == [False, False, False, True]
