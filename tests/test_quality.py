"""benchmarks/quality.py: which runs it does and how it reports them, two real runs of a few steps, its mistakes."""

import json
import math
import random
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.quality import models, program, results
from benchmarks.quality.models import ABLATION, FROZEN, HOPE, LLAMA, MODELS, NAMES, SIZES, VARIANTS, Size, build
from benchmarks.quality.plan import Job, Matrix, Rates, best_rates, best_recurrent_peer, ready_jobs, rows_at
from benchmarks.quality.report import differences, report
from benchmarks.quality.texts import book, part, prepare

pytestmark = pytest.mark.benchmarks

MICRO = Size(128, 2, 320, 4, 112, 669_000, 4, 3, (1e-3,), block_size=32, per_device_train_batch_size=2)
PUBLISHED = Path(__file__).parents[1] / "docs/results/quality.jsonl"
TEXTS = ("builtin", "moby_dick")
RATES = SIZES["small"].learning_rates


def matrix(sizes=("small",), texts=TEXTS, models=MODELS) -> Matrix:
    return Matrix({size: SIZES[size] for size in sizes}, texts, models, "builtin")


def run(model: str, rate: float, text: str = "builtin", seed: int = 1) -> Job:
    """One of the small size, with one rate for all."""
    return Job("small", text, model, Rates(rate), seed)


def off_middle(job: Job) -> float:
    """A loss that ends every search of three rates at the middle one, for matrices and for vectors."""
    size, vectors = SIZES[job.size], job.rates.vectors
    distance = abs(job.rates.matrices - size.learning_rates[1])
    if len(size.vector_learning_rates) > 1:
        distance += abs(vectors - size.vector_learning_rates[1])
    return 3.0 + distance


def finish(losses: dict, jobs, loss=off_middle) -> dict:
    return losses | {job: loss(job) for job in jobs}


def row(job: Job, loss: float | None, **changes) -> dict:
    size = SIZES[job.size]
    settings = results.settings(build(job.model, size), size, job.rates.vectors)
    made = {"settings": settings, "data": "d", "eval_loss": loss, "bits_per_byte": loss, "commit": "c"}
    rates = {"learning_rate": job.rates.matrices, "vector_learning_rate": job.rates.vectors}
    return {"size": job.size, "text": job.text, "model": job.model, "seed": job.seed, **rates, **made, **changes}


def test_the_search_comes_first_and_only_on_one_text():
    ready = ready_jobs(matrix(), {})
    assert ready == [run(model, rate) for model in MODELS for rate in RATES]
    assert ready == ready_jobs(matrix(texts=("moby_dick",)), {})


def test_other_texts_wait_for_the_whole_search_of_their_model_and_use_its_best_rate():
    plan = matrix(models=(LLAMA,))
    searched = ready_jobs(plan, {})
    two = finish({}, searched[:2])
    assert best_rates(plan, "small", LLAMA, two) is None and ready_jobs(plan, two) == searched[2:]
    three = finish(two, searched[2:])
    assert ready_jobs(plan, three) == [run(LLAMA, RATES[1], "moby_dick")]
    assert ready_jobs(plan, finish(three, ready_jobs(plan, three))) == []


@pytest.mark.parametrize("best", [RATES[0] / 2, RATES[0] / 8, 2 * RATES[2]])
def test_the_search_goes_on_beyond_an_edge_that_is_the_best(best):
    plan = matrix(models=(LLAMA,))
    losses, searched = {}, []
    while ready := ready_jobs(plan, losses):
        if ready[0].text == "moby_dick":
            break
        searched += [job.rates.matrices for job in ready]
        losses = finish(losses, ready, lambda job: abs(math.log2(job.rates.matrices / best)))
    assert ready == [run(LLAMA, best, "moby_dick")]
    # Until one rate beyond the best, and no further.
    beyond = best / 2 if best < RATES[0] else 2 * best
    assert searched[-1] == beyond and len(searched) == len(set(searched))


def test_a_search_ends_where_training_diverges():
    plan = matrix(models=(LLAMA,))
    losses = finish({}, ready_jobs(plan, {}), lambda job: -job.rates.matrices)
    (further,) = ready_jobs(plan, losses)
    assert further.rates.matrices == 2 * RATES[2]
    assert ready_jobs(plan, losses | {further: math.inf}) == [run(LLAMA, RATES[2], "moby_dick")]
    assert [job.text for job in ready_jobs(plan, finish({}, ready_jobs(plan, {}), lambda job: math.inf))] == [
        "moby_dick"
    ]


def with_vectors(*vectors: float) -> Matrix:
    size = replace(SIZES["small"], vector_learning_rates=vectors)
    return replace(matrix(models=(LLAMA,)), sizes={"small": size})


@pytest.mark.parametrize(
    "best, others",
    [
        (1e-2, [5e-3, 1e-2, 4e-2]),
        (2e-2, [1e-2, 4e-2]),
        (4e-2, [1e-2, 4e-2, 8e-2]),
        (1.6e-1, [1e-2, 4e-2, 8e-2, 1.6e-1, 3.2e-1]),
    ],
)
def test_vectors_rates_are_searched_at_the_best_rate_of_matrices(best, others):
    plan = with_vectors(1e-2, 2e-2, 4e-2)

    def loss(job):
        return abs(math.log2(job.rates.matrices / RATES[0])) + abs(math.log2(job.rates.vectors / best))

    losses, searched = {}, []
    while ready := ready_jobs(plan, losses):
        if ready[0].text == "moby_dick":
            break
        searched += [job.rates for job in ready]
        losses = finish(losses, ready, loss)
    assert [rates.matrices for rates in searched if rates.vectors == 2e-2] == [*RATES, RATES[0] / 2]
    assert sorted(rates.vectors for rates in searched if rates.vectors != 2e-2) == others
    assert {rates.matrices for rates in searched if rates.vectors != 2e-2} == {RATES[0]}
    assert ready == [Job("small", "moby_dick", LLAMA, Rates(RATES[0], best), 1)]


def test_a_row_beside_the_search_counts_where_it_is_the_best():
    plan = with_vectors(1e-2, 2e-2, 4e-2)
    middle, beside = Rates(RATES[1], 2e-2), Rates(RATES[0], 4e-2)

    def other_text(rates):
        return [Job("small", "moby_dick", LLAMA, rates, 1)]

    losses = {}
    while (ready := ready_jobs(plan, losses)) != other_text(middle):
        losses = finish(losses, ready, lambda job: float(job.rates != middle))
    assert ready_jobs(plan, losses | {Job("small", "builtin", LLAMA, beside, 2): -1.0}) == other_text(middle)
    assert ready_jobs(plan, losses | {Job("small", "builtin", LLAMA, beside, 1): -1.0}) == other_text(beside)


def test_rows_by_name_take_all_rates_of_vectors():
    plan = replace(with_vectors(1e-2, 2e-2), texts=("builtin",))
    named = rows_at([4e-3], [1])(plan, {})
    assert [job.rates for job in named] == [Rates(4e-3, 1e-2), Rates(4e-3, 2e-2)]


def test_more_seeds_for_hope_its_twin_and_the_better_recurrent_peer_of_each_text():
    plan = matrix(texts=("builtin", "moby_dick", "tinyshakespeare"))

    def loss(job):
        better = "gated_deltanet" if job.text == "moby_dick" else "mamba2"
        return abs(job.rates.matrices - RATES[1]) + (0.5 if job.model == better else 1.0)

    losses = {}
    while ready := [job for job in ready_jobs(plan, losses) if job.seed == 1]:
        losses = finish(losses, ready, loss)
    peers = {text: best_recurrent_peer(plan, "small", text, losses) for text in plan.texts}
    assert peers == {"builtin": "mamba2", "moby_dick": "gated_deltanet", "tinyshakespeare": "mamba2"}
    ready = ready_jobs(plan, losses)
    assert {(job.text, job.model, job.seed) for job in ready} == {
        (text, model, seed) for text in plan.texts for model in (HOPE, FROZEN, peers[text]) for seed in (2, 3)
    }
    assert {job.rates.matrices for job in ready} == {RATES[1]}
    assert ready_jobs(plan, finish(losses, ready)) == []


def test_rows_can_be_named_whatever_the_search_says():
    models, seeds = (HOPE, LLAMA), (3, 1)
    wanted, named = matrix(models=models), rows_at([8e-3, 8e-3], seeds)
    everything = [run(model, 8e-3, text, seed) for seed in seeds for text in TEXTS for model in models]
    assert named(wanted, {}) == everything
    assert named(wanted, finish({}, everything[:3])) == everything[3:]


def test_results_of_other_settings_or_texts_are_not_mixed():
    plan = matrix()
    job = run(LLAMA, RATES[0])
    good = row(job, 3.0)
    assert results.losses(results.current([good], plan, {"builtin": "d"})) == {job: 3.0}
    # If the text is missing, the latest one counts; of two rows of a run, the later.
    assert results.current([good, row(job, 2.0, data="e")], plan, {})[job]["eval_loss"] == 2.0
    assert results.current([good], plan, {"builtin": "another"}) == {}
    assert results.current([row(job, 3.0, settings="another")], plan, {"builtin": "d"}) == {}
    shorter = replace(plan, sizes={"small": replace(SIZES["small"], max_train_steps=7)})
    assert results.current([good], shorter, {"builtin": "d"}) == {}
    assert results.current([good], matrix(sizes=("medium",)), {}) == {}
    assert results.current([good | {"model": "a_variant_that_is_no_more"}], plan, {"builtin": "d"}) == {}


@pytest.mark.parametrize("name", NAMES)
def test_every_name_that_can_be_asked_for_has_rows(name):
    job = run(name, RATES[0])
    assert list(results.current([row(job, 3.0)], matrix(), {"builtin": "d"})) == [job]


def test_settings_follow_steps_batch_and_every_field_of_the_config():
    size = SIZES["small"]
    base = results.settings(build(HOPE, size), size)
    others = [replace(size, max_train_steps=9), replace(size, per_device_train_batch_size=4)]
    assert base not in [results.settings(build(HOPE, other), other) for other in others]
    model = build(HOPE, size)
    changed = replace(model, overrides=json.dumps(json.loads(model.overrides) | {"projection_memory_rate": 0.2}))
    assert base != results.settings(changed, size)
    assert base != results.settings(build(FROZEN, size), size)


def test_settings_follow_a_default_that_changes(monkeypatch):
    size = SIZES["small"]
    before = results.settings(build(HOPE, size), size)
    make = models._config
    monkeypatch.setattr(models, "_config", lambda *named: make(named[0], named[1] | {"conv_kernel_size": 3}))
    assert results.settings(build(HOPE, size), size) != before


def test_the_results_file_grows_by_whole_lines_and_refuses_others(tmp_path):
    file = tmp_path / "new" / "results.jsonl"
    assert results.load(file) == []
    rows = [row(run(LLAMA, rate), None) for rate in RATES]
    for one in rows:
        results.append(file, one)
    assert results.load(file) == rows
    with file.open("a") as stream:
        stream.write('{"size": "small"')
    with pytest.raises(ValueError, match="line 4 is not a finished run"):
        results.load(file)


def test_the_report_shows_means_ratios_and_what_is_missing():
    plan = matrix()
    empty = report(plan, {})
    assert "missing" in empty and not any(f"{digit}.{digit}" in empty for digit in range(10))
    jobs, losses = {}, {}
    while ready := ready_jobs(plan, losses):
        for job in ready:
            loss = {HOPE: 3.0, FROZEN: 3.2, LLAMA: 4.0}.get(job.model, 3.5) + abs(job.rates.matrices - RATES[1])
            losses[job] = loss + 0.1 * (job.seed - 1)
            jobs[job] = row(job, losses[job])
    open_end = run(LLAMA, RATES[2])
    assert f"{RATES[2]:g} (the search goes on) |" in report(
        plan, jobs | {open_end: jobs[open_end] | {"eval_loss": 0.1}}
    )
    whole = report(plan, jobs)
    assert "missing" not in whole and "goes on" not in whole
    parameters = f"{build(HOPE, SIZES['small']).parameters:,}"
    cell = "3.1000 ± 0.1000 (3 seeds)"
    assert f"| {HOPE} | {parameters} | {RATES[1]:g} | {cell} | {cell} |" in whole
    (line,) = [line for line in whole.splitlines() if line.startswith("| moby_dick |")]
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    # Llama has one seed: only that one is compared.
    assert cells[2] == "0.7500" and cells[1].startswith("0.9394 ± 0.0018 (3") and cells[-1] == "yes"
    assert cells[4].endswith("mamba2")

    better = {job: one | {"eval_loss": losses[job] - (job.model == FROZEN)} for job, one in jobs.items()}
    (line,) = [line for line in report(plan, better).splitlines() if line.startswith("| moby_dick |")]
    assert line.endswith("| no |")
    (gone,) = [job for job in jobs if job.model == LLAMA and job.text == "moby_dick"]
    partly = report(plan, {job: one for job, one in jobs.items() if job != gone})
    (line,) = [line for line in partly.splitlines() if line.startswith("| moby_dick |")]
    assert line.count("missing") == 2
    diverged = report(plan, jobs | {gone: {**jobs[gone], "eval_loss": None, "bits_per_byte": None}})
    assert "diverged" in diverged and "nan" not in diverged and "inf" not in diverged


@pytest.fixture
def data_dir(tmp_path):
    folder = tmp_path / "data" / "text"
    folder.mkdir(parents=True)
    generator = random.Random(0)
    words = ["".join(generator.choices("abcdefghij", k=generator.randint(2, 7))) for _ in range(60)]
    lines = [" ".join(generator.choices(words, k=8)) for _ in range(200)]
    (folder / "tinyshakespeare.txt").write_text("\n".join(lines) + "\n")
    return folder.parent


def test_the_last_tenth_is_held_out_and_nothing_is_lost():
    text = "".join(f"line {index}\n" for index in range(1000))
    train, validation = part(text)
    assert train + validation == text and train.endswith("\n")
    assert len(validation) == pytest.approx(len(text) / 10, abs=10)


def test_a_book_begins_and_ends_at_project_gutenbergs_notices():
    notices = ("About\n*** START OF THIS BOOK ***\n", "Chapter\n*** no mark\n", "*** END OF THIS BOOK ***\nLicence\n")
    assert book("".join(notices)) == notices[1]
    assert book("no notices\n") == "no notices\n"


def test_a_text_is_prepared_once_and_its_digest_follows_it(tmp_path, data_dir):
    text = prepare("tinyshakespeare", data_dir, tmp_path / "work")
    whole = (data_dir / "text/tinyshakespeare.txt").read_text()
    assert text.train.read_text() + text.validation.read_text() == whole
    tokenizer = text.tokenizer(300)
    before = (tokenizer / "tokenizer.json").stat().st_mtime_ns
    assert prepare("tinyshakespeare", data_dir, tmp_path / "work") == text
    assert (text.tokenizer(300) / "tokenizer.json").stat().st_mtime_ns == before
    (data_dir / "text/tinyshakespeare.txt").write_text(whole.replace("a", "b"))
    assert prepare("tinyshakespeare", data_dir, tmp_path / "work").digest != text.digest


@pytest.mark.usefixtures("warm_python")
def test_two_runs_are_trained_recorded_and_not_repeated(tmp_path, data_dir, monkeypatch, capsys):
    monkeypatch.setitem(SIZES, "micro", MICRO)
    vectors = ["--vector_learning_rates", "0.03"]
    words = ["--output_dir", tmp_path / "out", "--data_dir", data_dir, "--sizes", "micro"]
    words += ["--texts", "tinyshakespeare", "--search_text", "tinyshakespeare", "--models", "hope", "llama_conv"]
    words = list(map(str, words))
    assert program.main([*words, "--plan"]) == 0
    assert "2 runs can start" in capsys.readouterr().out and not (tmp_path / "out/results.jsonl").exists()

    assert program.main(words) == 0
    rows = [json.loads(line) for line in (tmp_path / "out/results.jsonl").read_text().splitlines()]
    assert sorted(row["model"] for row in rows) == ["hope", "llama_conv"]
    for row in rows:
        assert 4 < row["eval_loss"] < 7 and row["perplexity"] > 50 and row["bits_per_byte"] > 0 and row["seconds"] > 0
        assert (row["steps"], row["tokens"], row["threads"], row["seed"]) == (3, 3 * 64, 1, 1)
        assert row["commit"] and row["versions"]["torch"] and row["date"] and row["parameters"] > 1e5
    shown = capsys.readouterr().out
    for row in rows:
        assert f"{row['eval_loss']:.4f} |" in shown
    assert not list((tmp_path / "out").glob("runs/*/checkpoint-*"))

    assert program.main(words) == 0
    assert "start" not in capsys.readouterr().out
    assert program.main([*words, "--learning_rates", "1e-3", "--seeds", "1", "2", "--plan"]) == 0
    assert "learning rate 0.001, seed 2\n2 runs" in capsys.readouterr().out
    for other, heading in ((["--max_train_steps", "5"], "320 tokens: "), (vectors, "192 tokens: ")):
        assert program.main([*words, *other, "--report"]) == 0
        shown = capsys.readouterr().out
        assert heading in shown and "Left out: 2 runs" in shown and f"{rows[0]['eval_loss']:.4f}" not in shown

    hope_alone = words[:-1]
    assert program.main([*hope_alone, *vectors]) == 0
    third = json.loads((tmp_path / "out/results.jsonl").read_text().splitlines()[2])
    assert third["vector_learning_rate"] == 0.03 and rows[0]["vector_learning_rate"] is None
    assert "| hope | " in (shown := capsys.readouterr().out) and "| 0.001, vectors 0.03 |" in shown
    assert third["eval_loss"] != next(row for row in rows if row["model"] == "hope")["eval_loss"]


@pytest.mark.usefixtures("warm_python")
def test_a_run_that_fails_is_reported_and_recorded_nowhere(tmp_path, data_dir, monkeypatch, capsys):
    monkeypatch.setitem(SIZES, "micro", MICRO)
    # A program that fails with a sentence, as run_clm.py does.
    failing = tmp_path / "failing.py"
    failing.write_text("import sys\nprint('error: no training today')\nsys.exit(2)\n")
    monkeypatch.setattr("benchmarks.quality.runs.PROGRAM", failing)
    words = ["--output_dir", tmp_path / "out", "--data_dir", data_dir, "--sizes", "micro", "--models", "llama"]
    words += ["--texts", "tinyshakespeare", "--search_text", "tinyshakespeare"]
    assert program.main(list(map(str, words))) == 1
    assert "error: no training today" in capsys.readouterr().out
    assert not (tmp_path / "out/results.jsonl").exists()


def test_mistakes_are_one_sentence(tmp_path, data_dir, monkeypatch, capsys):
    monkeypatch.delenv("HOPE_TEST_DATA", raising=False)

    def says(*words: str) -> str:
        assert program.main(["--output_dir", str(tmp_path / "out"), *words]) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ") and error.count("\n") == 1
        return error

    assert "--data_dir" in says("--texts", "moby_dick")
    assert "moby_dick.txt (No such file" in says("--texts", "moby_dick", "--data_dir", str(data_dir))
    assert "--parallel is 0" in says("--parallel", "0")
    assert "--max_train_steps is -1" in says("--max_train_steps", "-1")
    assert "--vector_learning_rates must lie between 0 and 1, not 0" in says("--vector_learning_rates", "3e-2", "0")
    assert "--seeds needs --learning_rates" in says("--seeds", "2")
    assert "between 0 and 1" in says("--learning_rates", "4")
    assert "leave out --learning_rates" in says("--learning_rates", "4e-3", "--report")
    broken = tmp_path / "broken.jsonl"
    broken.write_text("nothing\n")
    assert "line 1" in says("--report", "--texts", "builtin", "--results", str(broken))
    (tmp_path / "out").mkdir(exist_ok=True)
    with (tmp_path / "out/.lock").open("w") as lock:
        program.lock_folder(lock, tmp_path)
        assert "in use" in says("--texts", "builtin")


def test_missing_texts_are_left_out_where_none_was_named(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("HOPE_TEST_DATA", raising=False)
    assert program.main(["--output_dir", str(tmp_path), "--sizes", "small", "--models", "llama", "--plan"]) == 0
    shown = capsys.readouterr()
    assert shown.err.count("left out: ") == 2 and "small builtin llama" in shown.out and "moby" not in shown.out


def ablation_job(model: str, seed: int) -> Job:
    return Job("small", "builtin", model, Rates(1.6e-2), seed)


def ablation_matrix(*names: str) -> Matrix:
    return Matrix({"small": ABLATION}, ("builtin",), names, "builtin")


def test_every_variant_changes_what_it_names_and_nothing_else():
    plain = build(HOPE, ABLATION)
    base = json.loads(plain.overrides)
    identities = {plain.identity}
    for name, changes in VARIANTS.items():
        model = build(name, ABLATION)
        overrides = json.loads(model.overrides)
        changed = {key for key in overrides if overrides[key] != base.get(key)}
        assert changed <= changes.keys() and changed, name
        assert model.identity not in identities, f"{name} is the default, or another variant"
        identities.add(model.identity)


def test_levels_of_a_variant_keep_their_width_in_sum():
    base = json.loads(build(HOPE, ABLATION).overrides)
    for name in ("one_level", "clocks_1_4_16"):
        overrides = json.loads(build(name, ABLATION).overrides)
        assert sum(overrides["level_intermediate_sizes"]) == sum(base["level_intermediate_sizes"])
        periods = [period / ABLATION.tokens_per_step for period in overrides["level_periods"]]
        assert periods == VARIANTS[name]["level_periods"]


def test_differences_are_those_of_a_seed():
    def row(loss, seconds):
        return {"eval_loss": loss, "seconds": seconds}

    rows = {
        ablation_job(HOPE, 1): row(3.0, 100.0), ablation_job(HOPE, 2): row(4.0, 100.0),
        ablation_job("paper", 1): row(3.5, 50.0), ablation_job("paper", 2): row(4.3, 60.0),
        ablation_job(FROZEN, 1): row(3.1, 25.0),
    }  # fmt: skip
    lines = differences(ablation_matrix(HOPE, FROZEN, "paper", "no_value_gate"), rows).splitlines()
    assert "| +0.0000 ± 0.0000 (2 seeds) |" in lines[2]
    assert "| 3.1000 | +0.1000 | 0.25 |" in lines[3]
    assert "| 3.9000 ± 0.5657 (2 seeds) | +0.4000 ± 0.1414 (2 seeds) | 0.55 ± 0.07 (2 seeds) |" in lines[4]
    assert "missing | missing | missing" in lines[5]
    diverged = rows | {ablation_job("no_value_gate", 1): row(None, 50.0)}
    assert "| diverged | diverged | 0.50 |" in differences(ablation_matrix(HOPE, "no_value_gate"), diverged)


@pytest.mark.parametrize("words", [[], ["--ablation"]])
def test_the_published_rows_are_shown(words, tmp_path, capsys):
    assert program.main([*words, "--output_dir", str(tmp_path), "--report", "--results", str(PUBLISHED)]) == 0
    assert "| hope_frozen | 62" in capsys.readouterr().out
