"""Rows of what fills a process's memory."""

import json

import pytest
import torch
from torch import nn

from hope_hf.training.memory_report import MemoryReport
from hope_hf.training.placement import GIB


def trained(steps: int, every: int, folder) -> list[dict]:
    model = nn.Linear(64, 32, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    report = MemoryReport(folder, 0, torch.device("cpu"), every)
    report.step(0, model, optimizer)
    for step in range(1, steps + 1):
        model(torch.ones(1, 64)).sum().backward()
        optimizer.step()
        report.step(step, model, optimizer)
    return [json.loads(line) for line in (folder / "memory_rank0.jsonl").read_text().splitlines()]


def test_rows_at_the_start_after_the_first_step_and_every_so_often(tmp_path):
    rows = trained(6, 3, tmp_path)
    assert [(row["event"], row["step"]) for row in rows] == [("start", 0), ("step", 1), ("step", 3), ("step", 6)]
    weight = 64 * 32 * 4 / GIB
    assert [row["parameters_gib"] for row in rows] == [weight] * 4
    assert [row["gradients_gib"] for row in rows] == [0, weight, weight, weight]
    # Two moments and a count.
    assert [row["optimizer_gib"] for row in rows[:2]] == [0, 2 * weight + 4 / GIB]
    assert all(row["peak_gib"] > 0 and row["free_gib"] > 0 for row in rows)
    assert len(trained(4, 0, tmp_path)) == len(rows) + 2


def test_running_out_of_memory_leaves_a_row_and_is_not_swallowed(tmp_path):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    report = MemoryReport(tmp_path, 1, torch.device("cpu"), 0)
    with pytest.raises(torch.OutOfMemoryError), report.out_of_memory(model, optimizer):
        raise torch.OutOfMemoryError("full")
    (row,) = map(json.loads, (tmp_path / "memory_rank1.jsonl").read_text().splitlines())
    assert (row["event"], row["step"]) == ("out of memory", None)
