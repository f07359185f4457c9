"""benchmarks/levels.py: its cases with a tiny random model and made-up texts, its table and its picture."""

import json
import random
from pathlib import Path

import pytest
import torch

from benchmarks.levels import cases
from benchmarks.levels.bench import Bench
from benchmarks.levels.program import CASES, main
from benchmarks.levels.reading import TrainedReading, read_in_turn
from benchmarks.levels.report import WRITERS
from hope_hf import HopeConfig, HopeForCausalLM, LevelLearning
from hope_hf.data.vocabulary import save_tokenizer, train_tokenizer

pytestmark = pytest.mark.benchmarks

PIECE = 8
NOVEL = "gutenberg_2701_moby_dick"
WORDS = "call me some years ago never mind how long precisely having little or no money in purse".split()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Made-up texts, and a converted model as `hope-hf convert` writes it, but tiny and random."""
    folder, draw = tmp_path_factory.mktemp("levels"), random.Random(0)
    (folder / "text").mkdir()
    for name in (NOVEL, "tinyshakespeare", "wikitext2_test", "wikitext2_valid"):
        (folder / f"text/{name}.txt").write_text("Title\n\n" + " ".join(draw.choices(WORDS, k=2000)))
    save_tokenizer(train_tokenizer([" ".join(WORDS * 20)], 320), folder / "model")
    torch.manual_seed(0)
    config = HopeConfig(
        vocab_size=320, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
        layer_types=["window_attention"] * 2, sliding_window=16, attention_sinks=4, level_intermediate_sizes=[48],
        level_periods=[PIECE], level_learning=LevelLearning(periods=[PIECE], gate=False), initializer_range=0.2,
    )  # fmt: skip
    HopeForCausalLM(config).save_pretrained(folder / "model")
    return folder


@pytest.fixture(scope="module")
def bench(folder) -> Bench:
    return Bench(folder / "model", folder, folder / f"text/{NOVEL}.txt", "float32", shorten=256)


def test_learning_lowers_the_loss_of_a_text_that_repeats(bench):
    readings = cases.frozen_and_learning(bench.load()).values()
    read_in_turn(readings, torch.arange(PIECE).repeat(40), PIECE)
    frozen, learning = (reading.losses for reading in readings)
    # alike until the first step; the two sums run in another order
    assert learning[0] == pytest.approx(frozen[0], rel=2**-22) and learning[-1] < frozen[-1]


def test_trained_reading_is_sgd_on_a_copy(bench):
    model, rate, ids = bench.load(), 0.1, torch.arange(PIECE)
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    reading = TrainedReading(model, lambda weights: torch.optim.SGD(weights, lr=rate))
    reading.read(ids)
    assert all(torch.equal(weight, before[name]) for name, weight in model.named_parameters())
    twin = bench.load().requires_grad_(True)
    twin(ids[None], labels=ids[None]).loss.backward()
    for trained, start in zip(reading.model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(trained.data, start.data - rate * start.grad)


@pytest.mark.processes
def test_the_cases_are_measured_and_printed(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(cases, "FINE_TUNING", dict(list(cases.FINE_TUNING.items())[:1]))
    flags = ["--model", str(folder / "model"), "--data_dir", str(folder), "--shorten", "256", "--dtype", "float32"]
    results = tmp_path / "levels.jsonl"
    names = ["novel", "original", "segments", "hostile", "saved", "own"]
    assert main([*names, *flags, "--results", str(results)]) == 0
    rows = {}
    for line in results.read_text().splitlines():
        row = json.loads(line)
        rows[row["case"], f"{row['what']} {row.get('of', '')}".strip()] = row
    assert [*CASES] == [*WRITERS] and {case for case, _ in rows} == {*names}
    # original attention sees everything, the window as much as it is wide
    full, window = (rows["original", f"{what}, frozen {NOVEL}"]["by_piece"] for what in (cases.ORIGINAL, cases.WINDOW))
    inside = 16 // PIECE
    assert full[:inside] == pytest.approx(window[:inside], abs=2e-5)
    assert full[inside:] != pytest.approx(window[inside:], abs=1e-3)
    # without learning nothing is forgotten but the context; a state in 32 bits loses nothing
    frozen = rows["segments", cases.FROZEN]
    assert frozen["first_after_all"] == pytest.approx(frozen["first_after_itself"], abs=0.5)
    assert rows["saved", "float32"]["difference"] == 0
    assert all(row["above"] == row["learning"] / row["frozen"] - 1 for (case, _), row in rows.items()
               if case == "hostile")  # fmt: skip
    assert "| learning: loss of 64 tokens |" in capsys.readouterr().out
    picture = tmp_path / "levels.png"
    assert main(["--results", str(results), "--picture", str(picture)]) == 0
    assert picture.read_bytes()[:4] == b"\x89PNG"


def test_hostile_texts_are_what_they_are_called():
    ids = torch.arange(100, 400)
    texts = cases.hostile_texts(ids, 1000)
    assert torch.equal(texts["shuffled text"].sort().values, ids)
    assert len(set(texts["one token"].tolist())) == 1 and len(set(texts["a repeated sentence"].tolist())) == 40
    same = texts["text with spans of 64 random tokens"] == ids
    assert same[:64].all() and same[64:128].sum() < 5 and same[128:192].all()


@pytest.mark.parametrize("flags, named", [
    ("dance", "dance"), ("novel", "--model"), ("novel --model nowhere --data_dir .", "--model nowhere"),
    ("--picture none.png", "--picture"),
])  # fmt: skip
def test_mistakes_are_one_sentence(flags, named, capsys, tmp_path, monkeypatch):
    monkeypatch.delenv("HOPE_TEST_DATA", raising=False)
    assert main([*flags.split(), "--results", str(tmp_path / "none.jsonl")]) == 2
    assert named in capsys.readouterr().err
