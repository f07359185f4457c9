"""Threads are halved where steps have become far slower than the fastest one."""

import torch

from hope_hf.training.watch.telemetry import ThreadLimit


def test_threads_are_halved_after_steps_that_are_far_slower(monkeypatch):
    threads, said = [8], []
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads[-1])
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    limit = ThreadLimit(said.append)
    # A first step and a single slow one are no reason, and neither are steps of less than a second.
    for seconds in (9.0, 0.5, 6.0, 6.0, 0.5, 6.0, 6.0, 4.9):
        limit.step_ends(seconds)
    assert threads == [8]
    for _ in range(12):
        limit.step_ends(6.0)
    assert threads == [8, 4, 2, 1] and len(said) == 3
    assert "4 thread(s) from here on, and not 8 (--cpu_threads)" in said[0]
