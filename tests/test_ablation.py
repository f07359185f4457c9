"""The ablation: every variant is one change, every run is planned once, differences are per seed."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import quality
from benchmarks.ablation import SHAPE, SIZE, main, table
from benchmarks.quality_models import FROZEN, HOPE, build
from benchmarks.quality_plan import Job, Matrix, Rates, rows_at
from benchmarks.quality_texts import BUILTIN
from benchmarks.variants import VARIANTS

pytestmark = pytest.mark.benchmarks

RATE = 4e-3


def matrix(*models: str, seeds=(1, 2)) -> Matrix:
    size = replace(SHAPE, learning_rates=(RATE,), more_seeds=seeds)
    return Matrix({SIZE: size}, (BUILTIN,), models, BUILTIN)


def job(model: str, seed: int) -> Job:
    return Job(SIZE, BUILTIN, model, Rates(RATE), seed)


def test_every_variant_changes_what_it_names_and_nothing_else():
    plain = build(HOPE, SHAPE)
    base = json.loads(plain.overrides)
    identities = {plain.identity}
    for name, changes in VARIANTS.items():
        model = build(name, SHAPE)
        overrides = json.loads(model.overrides)
        changed = {key for key in overrides if overrides[key] != base.get(key)}
        assert changed <= changes.keys() and changed, name
        assert model.identity not in identities, f"{name} is the default, or another variant"
        identities.add(model.identity)


def test_levels_keep_their_width_in_sum():
    base = json.loads(build(HOPE, SHAPE).overrides)
    for name in ("one_level", "clocks_1_4_16"):
        overrides = json.loads(build(name, SHAPE).overrides)
        assert sum(overrides["level_intermediate_sizes"]) == sum(base["level_intermediate_sizes"])
        periods = [period / SHAPE.tokens_per_step for period in overrides["level_periods"]]
        assert periods == VARIANTS[name]["level_periods"]


def test_every_run_is_planned_once_seed_by_seed():
    jobs = rows_at([RATE], [1, 2])(matrix(HOPE, "paper"), {job(HOPE, 2): 3.0})
    assert jobs == [job(HOPE, 1), job("paper", 1), job("paper", 2)]


def test_differences_are_those_of_a_seed():
    def row(loss, seconds):
        return {"eval_loss": loss, "seconds": seconds}

    rows = {
        job(HOPE, 1): row(3.0, 100.0), job(HOPE, 2): row(4.0, 100.0),
        job("paper", 1): row(3.5, 50.0), job("paper", 2): row(4.3, 60.0), job(FROZEN, 1): row(3.1, 25.0),
    }  # fmt: skip
    lines = table(matrix(HOPE, FROZEN, "paper", "no_value_gate"), rows).splitlines()
    assert "+0.0000 ± 0.0000 | 2 |" in lines[2]
    assert "| 3.1000 | +0.1000 | 1 | 0.25 |" in lines[3]
    assert "| 3.9000 ± 0.5657 | +0.4000 ± 0.1414 | 2 | 0.55 ± 0.0707 |" in lines[4]
    assert "missing | missing | 0 | missing" in lines[5]
    diverged = rows | {job("no_value_gate", 1): row(None, 50.0)}
    assert "| diverged | diverged | 1 | 0.50 |" in table(matrix(HOPE, "no_value_gate"), diverged).splitlines()[3]


@pytest.mark.parametrize("flags", [["--parallel", "0"], ["--learning_rate", "2"]])
def test_one_sentence_for_wrong_flags(tmp_path, flags, capsys):
    assert main(["--output_dir", str(tmp_path), *flags]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("program", [main, quality.main])
def test_the_published_rows_are_shown(program, tmp_path, capsys):
    published = Path(__file__).parents[1] / "docs/results/quality.jsonl"
    assert program(["--output_dir", str(tmp_path), "--report", "--results", str(published)]) == 0
    assert "| hope_frozen | 62" in capsys.readouterr().out
