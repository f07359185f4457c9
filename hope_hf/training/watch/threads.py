"""Fewer threads where other programs need the cores: all threads wait for one that has none."""

from collections.abc import Callable

import torch

SLOWER = 10
"""Times as slow as the fastest step."""
IN_A_ROW = 3
SHORTEST = 1.0
"""Seconds of a step that is worth it."""


class ThreadLimit:
    """Halves this process's threads after steps that were far slower than the fastest one; `say` tells the user."""

    def __init__(self, say: Callable[[str], None]):
        self._say = say
        self._fastest = float("inf")
        self._slow = 0

    def step_ends(self, seconds: float) -> None:
        """`seconds`: of a step, without waiting for data."""
        self._fastest = min(self._fastest, seconds)
        is_slow = seconds > max(SLOWER * self._fastest, SHORTEST)
        self._slow = self._slow + 1 if is_slow else 0
        threads = torch.get_num_threads()
        if self._slow < IN_A_ROW or threads == 1:
            return
        self._slow = 0
        torch.set_num_threads(threads // 2)
        self._say(
            f"warning: the last {IN_A_ROW} steps took over {SLOWER} times as long as the fastest, so another program "
            f"may need the cores: {threads // 2} thread(s) from here on, and not {threads} (--cpu_threads)."
        )
