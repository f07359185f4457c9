"""benchmarks/quality.py: which runs it does and how it reports them, two real runs of a few steps, its mistakes."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.quality import program, results
from benchmarks.quality.models import ABLATION, FROZEN, HOPE, LLAMA, MODELS, SIZES, VARIANTS, Size, build
from benchmarks.quality.plan import Job, Matrix, Rates, ready_jobs, rows_at
from benchmarks.quality.report import differences, report
from benchmarks.quality.texts import book, part

pytestmark = pytest.mark.benchmarks

MICRO = Size(128, 2, 320, 4, 112, 669_000, 4, 3, (1e-3,), block_size=32, per_device_train_batch_size=2)
PUBLISHED = Path(__file__).parents[1] / "docs/results/quality.jsonl"
SMALL = SIZES["small"]
LOW, MIDDLE, HIGH = SMALL.learning_rates


def matrix(models=MODELS, texts=("builtin", "moby_dick"), **changes) -> Matrix:
    return Matrix({"small": replace(SMALL, **changes)}, texts, models, "builtin")


def job(model: str, rate: float, text: str = "builtin", seed: int = 1, vectors: float | None = None) -> Job:
    return Job("small", text, model, Rates(rate, vectors), seed)


def finish(plan: Matrix, loss, seeds=(1, 2, 3)) -> dict[Job, float]:
    """Losses of all runs that the plan asks for, one after the other."""
    losses = {}
    while ready := [one for one in ready_jobs(plan, losses) if one.seed in seeds]:
        losses.update((one, loss(one)) for one in ready)
    return losses


def far_from(best: float):
    return lambda one: abs(math.log2(one.rates.matrices / best))


def row(one: Job, loss: float | None, **changes) -> dict:
    settings = results.settings(build(one.model, SMALL), SMALL, one.rates.vectors)
    rates = {"learning_rate": one.rates.matrices, "vector_learning_rate": one.rates.vectors}
    measured = {"settings": settings, "data": "d", "eval_loss": loss, "bits_per_byte": loss, "commit": "c"}
    return {"size": one.size, "text": one.text, "model": one.model, "seed": one.seed, **rates, **measured, **changes}


def test_the_search_comes_first_on_one_text_and_others_use_its_best_rate():
    assert ready_jobs(matrix(), {}) == [job(model, rate) for model in MODELS for rate in SMALL.learning_rates]
    plan = matrix((LLAMA,))
    searched = {job(LLAMA, LOW): 3.1, job(LLAMA, MIDDLE): 3.0}
    assert ready_jobs(plan, searched) == [job(LLAMA, HIGH)]
    assert ready_jobs(plan, searched | {job(LLAMA, HIGH): 3.2}) == [job(LLAMA, MIDDLE, "moby_dick")]


@pytest.mark.parametrize("best, beyond", [(LOW / 8, LOW / 16), (2 * HIGH, 4 * HIGH)])
def test_the_search_goes_on_until_one_rate_beyond_the_best(best, beyond):
    losses = finish(matrix((LLAMA,)), far_from(best))
    *searched, other_text = losses
    assert searched[-1] == job(LLAMA, beyond) and other_text == job(LLAMA, best, "moby_dick")


def test_a_search_ends_where_training_diverges():
    losses = finish(matrix((LLAMA,)), lambda one: math.inf if one.rates.matrices > HIGH else -one.rates.matrices)
    assert [*losses][-2:] == [job(LLAMA, 2 * HIGH), job(LLAMA, HIGH, "moby_dick")]


def test_vectors_rates_are_searched_at_the_best_rate_of_matrices():
    plan = matrix((LLAMA,), vector_learning_rates=(1e-2, 2e-2, 4e-2))
    losses = finish(plan, lambda one: far_from(LOW)(one) + abs(math.log2(one.rates.vectors / 4e-2)))
    *searched, other_text = losses
    assert [one.rates for one in searched if one.rates.vectors != 2e-2] == [
        Rates(LOW, 1e-2), Rates(LOW, 4e-2), Rates(LOW, 8e-2),
    ]  # fmt: skip
    assert other_text == job(LLAMA, LOW, "moby_dick", vectors=4e-2)
    # a row beside the search counts where it is the best, at the first seed
    for seed, best in ((1, MIDDLE), (2, LOW)):
        beside = {one: losses[one] for one in searched} | {job(LLAMA, MIDDLE, seed=seed, vectors=4e-2): -1.0}
        assert ready_jobs(plan, beside) == [job(LLAMA, best, "moby_dick", vectors=4e-2)]


def test_more_seeds_for_hope_its_twin_and_the_better_recurrent_peer_of_each_text():
    def loss(one):
        better = "gated_deltanet" if one.text == "moby_dick" else "mamba2"
        return far_from(MIDDLE)(one) + (0.5 if one.model == better else 1.0)

    plan = matrix()
    ready = ready_jobs(plan, finish(plan, loss, seeds=(1,)))
    peers = {"builtin": "mamba2", "moby_dick": "gated_deltanet"}
    assert set(ready) == {
        job(model, MIDDLE, text, seed) for text in peers for model in (HOPE, FROZEN, peers[text]) for seed in (2, 3)
    }


def test_rows_can_be_named_whatever_the_search_says():
    plan = matrix((HOPE, LLAMA), ("builtin",), vector_learning_rates=(1e-2, 2e-2))
    named = rows_at([8e-3, 8e-3], (3, 1))
    everything = [
        job(model, 8e-3, seed=seed, vectors=vectors)
        for seed in (3, 1) for model in (HOPE, LLAMA) for vectors in (1e-2, 2e-2)
    ]  # fmt: skip
    assert named(plan, {}) == everything and named(plan, {everything[0]: 1.0}) == everything[1:]


def test_results_of_other_settings_or_texts_are_not_mixed():
    plan, one = matrix(), job(LLAMA, LOW)
    good = row(one, 3.0)
    assert results.losses(results.current([good], plan, {"builtin": "d"})) == {one: 3.0}
    # if the text is missing, the latest one counts; of two rows of a run, the later
    assert results.current([good, row(one, 2.0, data="e")], plan, {})[one]["eval_loss"] == 2.0
    for other in (good | {"data": "e"}, good | {"settings": "x"}, good | {"model": "gone"}, good | {"size": "deep"}):
        assert results.current([other], plan, {"builtin": "d"}) == {}
    assert results.current([good], matrix(max_train_steps=7), {"builtin": "d"}) == {}


def test_settings_follow_steps_batch_and_every_field_of_the_config():
    model = build(HOPE, SMALL)
    changed = json.dumps(json.loads(model.overrides) | {"projection_memory_rate": 0.2})
    hashes = {results.settings(one, SMALL) for one in (model, replace(model, overrides=changed), build(FROZEN, SMALL))}
    for other in (replace(SMALL, max_train_steps=9), replace(SMALL, per_device_train_batch_size=4)):
        hashes.add(results.settings(model, other))
    assert len(hashes) == 5


def test_the_report_shows_means_ratios_and_what_is_missing():
    def loss(one):
        of_model = {HOPE: 3.0, FROZEN: 3.2, LLAMA: 4.0}.get(one.model, 3.5)
        return of_model + abs(one.rates.matrices - MIDDLE) + 0.1 * (one.seed - 1)

    def moby(jobs) -> list[str]:
        (line,) = [line for line in report(plan, jobs).splitlines() if line.startswith("| moby_dick |")]
        return [cell.strip() for cell in line.strip("|").split("|")]

    plan = matrix()
    jobs = {one: row(one, found) for one, found in finish(plan, loss).items()}
    cell = "3.1000 ± 0.1000 (3 seeds)"
    assert f"| {build(HOPE, SMALL).parameters:,} | {MIDDLE:g} | {cell} | {cell} |" in report(plan, jobs)
    # Llama has one seed: only that one is compared
    cells = moby(jobs)
    assert cells[1].startswith("0.9394 ± 0.0018 (3") and cells[2] == "0.7500" and cells[4].endswith("mamba2")
    better = {one: found | {"eval_loss": found["eval_loss"] - (one.model == FROZEN)} for one, found in jobs.items()}
    assert (cells[-1], moby(better)[-1]) == ("yes", "no")
    llama = job(LLAMA, MIDDLE, "moby_dick")
    assert moby({one: found for one, found in jobs.items() if one != llama}).count("missing") == 2
    assert "diverged" in report(plan, jobs | {llama: row(llama, None)})
    high = job(LLAMA, HIGH)
    assert f"{HIGH:g} (the search goes on) |" in report(plan, jobs | {high: row(high, 0.1)})


def test_differences_are_those_of_a_seed():
    def seeds(model, *rows):
        for seed, (loss, seconds) in enumerate(rows, start=1):
            yield job(model, 1.6e-2, seed=seed), {"eval_loss": loss, "seconds": seconds}

    rows = dict(seeds(HOPE, (3.0, 100.0), (4.0, 100.0))) | dict(seeds("paper", (3.5, 50.0), (4.3, 60.0)))
    rows |= dict(seeds(FROZEN, (3.1, 25.0))) | dict(seeds("no_value_gate", (None, 50.0)))
    plan = Matrix({"small": ABLATION}, ("builtin",), (HOPE, FROZEN, "paper", "no_value_gate", "one_level"), "builtin")
    lines = differences(plan, rows).splitlines()
    assert "| +0.0000 ± 0.0000 (2 seeds) |" in lines[2] and "| 3.1000 | +0.1000 | 0.25 |" in lines[3]
    assert "| 3.9000 ± 0.5657 (2 seeds) | +0.4000 ± 0.1414 (2 seeds) | 0.55 ± 0.07 (2 seeds) |" in lines[4]
    assert "| diverged | diverged | 0.50 |" in lines[5] and "missing | missing | missing" in lines[6]


def test_every_variant_changes_what_it_names_and_nothing_else():
    plain = build(HOPE, ABLATION)
    base = json.loads(plain.overrides)
    identities = {plain.identity}
    for name, changes in VARIANTS.items():
        model = build(name, ABLATION)
        overrides = json.loads(model.overrides)
        changed = {key for key in overrides if overrides[key] != base.get(key)}
        assert changed and changed <= changes.keys(), name
        identities.add(model.identity)
        # levels keep their width in sum
        if name in ("one_level", "clocks_1_4_16"):
            assert sum(overrides["level_intermediate_sizes"]) == sum(base["level_intermediate_sizes"])
    assert len(identities) == 1 + len(VARIANTS)


def test_what_is_held_out_and_where_a_book_begins():
    text = "".join(f"line {index}\n" for index in range(1000))
    train, validation = part(text)
    assert train + validation == text and train.endswith("\n")
    assert len(validation) == pytest.approx(len(text) / 10, abs=10)
    notices = ("About\n*** START OF THIS BOOK ***\n", "Chapter\n*** no mark\n", "*** END OF THIS BOOK ***\nLicence\n")
    assert book("".join(notices)) == notices[1]


@pytest.fixture
def words(tmp_path, monkeypatch) -> list[str]:
    """Flags of two runs of a few steps."""
    monkeypatch.setitem(SIZES, "micro", MICRO)
    (tmp_path / "text").mkdir()
    lines = [f"{number} times {number + 1} are {number * (number + 1)}\n" for number in range(600)]
    (tmp_path / "text/tinyshakespeare.txt").write_text("".join(lines))
    folders = ["--output_dir", str(tmp_path / "out"), "--data_dir", str(tmp_path), "--sizes", "micro"]
    texts = ["--texts", "tinyshakespeare", "--search_text", "tinyshakespeare"]
    return [*folders, *texts, "--models", "hope", "llama_conv"]


@pytest.mark.usefixtures("warm_python")
def test_two_runs_are_trained_recorded_and_not_repeated(words, tmp_path, monkeypatch, capsys):
    results_file = tmp_path / "out/results.jsonl"
    assert program.main([*words, "--plan"]) == 0
    assert "2 runs can start" in capsys.readouterr().out and not results_file.exists()
    assert program.main(words) == 0
    shown = capsys.readouterr().out
    rows = results.load(results_file)
    assert sorted(row["model"] for row in rows) == ["hope", "llama_conv"]
    for row in rows:
        assert 4 < row["eval_loss"] < 7 and f"{row['eval_loss']:.4f} |" in shown
        assert (row["steps"], row["tokens"], row["threads"], row["seed"]) == (3, 3 * 64, 1, 1)
        assert row["commit"] and row["versions"]["torch"] and row["parameters"] > 1e5
    assert program.main(words) == 0 and len(results.load(results_file)) == 2
    capsys.readouterr()
    assert program.main([*words, "--max_train_steps", "5", "--report"]) == 0
    assert "Left out: 2 runs" in capsys.readouterr().out
    # a program that fails with a sentence, as run_clm.py does
    failing = tmp_path / "failing.py"
    failing.write_text("import sys\nprint('error: no training today')\nsys.exit(2)\n")
    monkeypatch.setattr("benchmarks.quality.runs.PROGRAM", failing)
    assert program.main([*words, "--vector_learning_rates", "0.03"]) == 1
    assert "error: no training today" in capsys.readouterr().out and len(results.load(results_file)) == 2
    with results_file.open("a") as stream:
        stream.write('{"size": "small"')
    with pytest.raises(ValueError, match="line 3"):
        results.load(results_file)


@pytest.mark.parametrize("flags, named", [
    ("--texts moby_dick", "--data_dir"),
    ("--parallel 0", "--parallel is 0"),
    ("--vector_learning_rates 3e-2 0", "--vector_learning_rates"),
    ("--seeds 2", "--learning_rates"),
    ("--learning_rates 4e-3 --report", "--learning_rates"),
])  # fmt: skip
def test_mistakes_are_one_sentence(flags, named, tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("HOPE_TEST_DATA", raising=False)
    assert program.main(["--output_dir", str(tmp_path), *flags.split()]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and named in error and error.count("\n") == 1


@pytest.mark.parametrize("words", [[], ["--ablation"]])
def test_the_published_rows_are_shown(words, tmp_path, capsys):
    assert program.main([*words, "--output_dir", str(tmp_path), "--report", "--results", str(PUBLISHED)]) == 0
    assert "| hope_frozen | 62" in capsys.readouterr().out
