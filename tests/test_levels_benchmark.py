"""benchmarks/levels.py: its cases with a tiny random model and made-up texts, its table and its picture."""

import json
import random
from pathlib import Path

import pytest
import torch

from benchmarks.levels import cases
from benchmarks.levels.bench import Bench
from benchmarks.levels.program import main
from benchmarks.levels.reading import TrainedReading
from hope_hf import HopeConfig, HopeForCausalLM, LevelLearning
from hope_hf.data.vocabulary import save_tokenizer, train_tokenizer

pytestmark = pytest.mark.benchmarks

PIECE = 8
WINDOW = 16
NOVEL = "gutenberg_2701_moby_dick"
WORDS = "call me some years ago never mind how long precisely having little or no money in purse".split()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Made-up texts, and a converted model as `hope-hf convert` writes it, but tiny and random."""
    folder = tmp_path_factory.mktemp("levels")
    draw = random.Random(0)
    (folder / "text").mkdir()
    for name in (NOVEL, "tinyshakespeare", "wikitext2_test", "wikitext2_valid"):
        (folder / f"text/{name}.txt").write_text("Title\n\n" + " ".join(draw.choices(WORDS, k=2000)))
    save_tokenizer(train_tokenizer([" ".join(WORDS * 20)], 320), folder / "model")
    torch.manual_seed(0)
    sizes = dict(vocab_size=320, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, initializer_range=0.2)
    window = dict(layer_types=["window_attention"] * 2, sliding_window=WINDOW, attention_sinks=4)
    levels = dict(level_intermediate_sizes=[48], level_periods=[PIECE])
    learning = LevelLearning(periods=[PIECE], gate=False)
    HopeForCausalLM(HopeConfig(**sizes, **window, **levels, level_learning=learning)).save_pretrained(folder / "model")
    return folder


def test_trained_reading_is_sgd_on_a_copy(folder):
    bench = Bench(folder / "model", folder, folder / f"text/{NOVEL}.txt", "float32", shorten=256)
    ids = torch.arange(PIECE)
    reading = TrainedReading(bench.load(), lambda weights: torch.optim.SGD(weights, lr=0.1))
    reading.read(ids)
    twin = bench.load().requires_grad_(True)
    twin(ids[None], labels=ids[None]).loss.backward()
    for trained, start in zip(reading.model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(trained.data, start.data - 0.1 * start.grad)


@pytest.mark.processes
def test_the_cases_are_measured_and_printed(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(cases, "FINE_TUNING", dict(list(cases.FINE_TUNING.items())[:1]))
    flags = ["--model", str(folder / "model"), "--data_dir", str(folder), "--shorten", "256", "--dtype", "float32"]
    results = tmp_path / "levels.jsonl"
    names = ["novel", "original", "book", "segments", "hostile", "saved", "own", "widths"]
    assert main([*names, *flags, "--results", str(results)]) == 0
    rows = {}
    for line in results.read_text().splitlines():
        row = json.loads(line)
        rows[row["case"], f"{row['what']} {row.get('of', '')}".strip()] = row
    assert {case for case, _ in rows} == {*names}
    # original attention sees everything, the window as much as it is wide
    full = rows["original", f"{cases.ORIGINAL}, frozen {NOVEL}"]["by_piece"]
    window = rows["original", f"{cases.WINDOW}, frozen {NOVEL}"]["by_piece"]
    inside = WINDOW // PIECE
    assert full[:inside] == pytest.approx(window[:inside], abs=2e-5)
    assert full[inside:] != pytest.approx(window[inside:], abs=1e-3)
    # 25 calls
    assert len(rows["book", "learning"]["process_mb"]) == 25
    # a state in 32 bits loses nothing
    assert rows["saved", "float32"]["difference"] == 0
    assert "| learning: loss of 64 tokens |" in capsys.readouterr().out
    picture = tmp_path / "levels.png"
    assert main(["--results", str(results), "--picture", str(picture)]) == 0
    assert picture.read_bytes()[:4] == b"\x89PNG"


def test_mistakes_are_one_sentence(capsys, tmp_path, monkeypatch):
    monkeypatch.delenv("HOPE_TEST_DATA", raising=False)
    for flags, named in (
        ("dance", "dance"),
        ("novel", "--model"),
        ("novel --model nowhere --data_dir .", "--model nowhere"),
        ("--picture none.png", "--picture"),
    ):
        assert main([*flags.split(), "--results", str(tmp_path / "none.jsonl")]) == 2
        assert named in capsys.readouterr().err
