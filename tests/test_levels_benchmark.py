"""benchmarks/levels.py: every case of it with a tiny random model and made-up texts, its table and its picture."""

import json
import random
from pathlib import Path

import pytest
import torch

from benchmarks.levels import cases, small, windows
from benchmarks.levels.bench import Bench, from_first_paragraph
from benchmarks.levels.program import CASES, main
from benchmarks.levels.reading import TrainedReading, read_in_turn
from benchmarks.levels.report import WRITERS, table
from hope_hf import HopeConfig, HopeForCausalLM, LevelLearning
from hope_hf.data.vocabulary import save_tokenizer, train_tokenizer

pytestmark = pytest.mark.benchmarks

PIECE = 8
NOVEL = "gutenberg_2701_moby_dick"
WORDS = "call me some years ago never mind how long precisely having little or no money in purse".split()
LABELS = {f"domain {group}": [f"intent_{group}_{index}" for index in range(5)] for group in range(5)}


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory) -> Path:
    folder, draw = tmp_path_factory.mktemp("data"), random.Random(0)
    for part in ("text", "cls"):
        (folder / part).mkdir()
    for name in ("gutenberg_2701_moby_dick", "tinyshakespeare", "wikitext2_test", "wikitext2_valid"):
        (folder / "text" / f"{name}.txt").write_text("Title\n\n" + " ".join(draw.choices(WORDS, k=2000)))
    pairs = [[f"{draw.choice(WORDS)} {label}", label] for labels in LABELS.values() for label in labels * 2]
    (folder / "cls/clinc150_domains.json").write_text(json.dumps(LABELS))
    (folder / "cls/clinc150_full.json").write_text(json.dumps({"train": pairs, "test": pairs}))
    return folder


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory, data_dir) -> Path:
    """A converted model as `hope-hf convert` writes it, but tiny and random."""
    folder = tmp_path_factory.mktemp("tiny")
    text = (data_dir / "text/tinyshakespeare.txt").read_text()
    tokenizer = train_tokenizer([text], 320)
    save_tokenizer(tokenizer, folder)
    torch.manual_seed(0)
    config = HopeConfig(
        vocab_size=320,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        layer_types=["window_attention"] * 2,
        sliding_window=16,
        attention_sinks=4,
        level_intermediate_sizes=[48],
        level_periods=[PIECE],
        level_learning=LevelLearning(periods=[PIECE], gate=False),
        initializer_range=0.2,
    )
    HopeForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def bench(model_dir, data_dir) -> Bench:
    return Bench(model_dir, data_dir, data_dir / "text/gutenberg_2701_moby_dick.txt", "float32", shorten=256)


@pytest.fixture
def words(model_dir, data_dir, tmp_path) -> list[str]:
    flags = ["--model", model_dir, "--data_dir", data_dir, "--shorten", 256, "--results", tmp_path / "levels.jsonl"]
    return [*map(str, flags), "--dtype", "float32"]


def measure(words: list[str], tmp_path: Path, *names: str) -> dict[str, dict]:
    assert main([*names, *words]) == 0
    rows = [json.loads(line) for line in (tmp_path / "levels.jsonl").read_text().splitlines()]
    assert {row["case"] for row in rows} == set(names) and all(row["dtype"] == "float32" for row in rows)
    return {f"{row['what']} {row.get('of', '')}".strip(): row for row in rows}


def test_learning_lowers_the_loss_of_a_text_that_repeats(bench):
    model = bench.load()
    readings = cases.frozen_and_learning(model).values()
    read_in_turn(readings, torch.arange(PIECE).repeat(40), PIECE)
    frozen, learning = (reading.losses for reading in readings)
    # alike until the first step; the two sums run in another order
    assert learning[0] == pytest.approx(frozen[0], rel=2**-22) and learning[-1] < frozen[-1]


def test_trained_reading_is_sgd_on_a_copy(bench):
    model, rate = bench.load(), 0.1
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    reading = TrainedReading(model, lambda weights: torch.optim.SGD(weights, lr=rate))
    ids = torch.arange(PIECE)
    reading.read(ids)
    assert all(torch.equal(weight, before[name]) for name, weight in model.named_parameters())
    twin = bench.load().requires_grad_(True)
    twin(ids[None], labels=ids[None]).loss.backward()
    for own, other in zip(reading.model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(own.data, other.data - rate * other.grad)
    reading.learn = False
    reading.read(ids)
    torch.testing.assert_close(next(reading.model.parameters()).data, next(twin.parameters()).data, atol=1, rtol=1)


def test_novel_long_and_dynamic(words, tmp_path, capsys):
    rows = measure(words, tmp_path, "novel", "dynamic", "long")
    printed = capsys.readouterr().out
    assert "| learning: loss of 64 tokens |" in printed and "SGD of all weights, 0.03" in printed
    assert len(rows[cases.EVERYWHERE]["by_piece"]) == 8
    # of `frozen` and `learning` the case `long` wrote the later rows
    assert len(rows[cases.LEARNING]["process_mb"]) == 16
    assert rows[cases.LEARNING]["by_piece"] != rows[cases.FROZEN]["by_piece"]


def test_original_sees_everything_and_the_window_as_much_as_it_is_wide(words, tmp_path, capsys):
    rows = measure(words, tmp_path, "original")
    full, window = rows[f"{cases.ORIGINAL}, frozen {NOVEL}"], rows[f"{cases.WINDOW}, frozen {NOVEL}"]
    in_the_window = 16 // PIECE
    assert full["by_piece"][:in_the_window] == pytest.approx(window["by_piece"][:in_the_window], abs=2e-5)
    assert full["by_piece"][in_the_window:] != pytest.approx(window["by_piece"][in_the_window:], abs=1e-3)
    assert f"| {NOVEL}, 32 tokens, window, learning | {full['loss']:.4f} to " in capsys.readouterr().out
    picture = tmp_path / "levels.png"
    assert main(["--results", str(tmp_path / "levels.jsonl"), "--picture", str(picture)]) == 0
    assert picture.read_bytes()[:4] == b"\x89PNG"


def test_segments(words, tmp_path, monkeypatch):
    monkeypatch.setattr(cases, "FINE_TUNING", dict(list(cases.FINE_TUNING.items())[:1]))
    rows = measure(words, tmp_path, "segments")
    assert list(rows) == [cases.FROZEN, cases.LEARNING, *cases.FINE_TUNING]
    assert all(list(row["segments"]) == list(cases.SEGMENTS) for row in rows.values())
    # without learning nothing is forgotten but the context
    frozen = rows[cases.FROZEN]
    assert frozen["first_after_all"] == pytest.approx(frozen["first_after_itself"], abs=0.5)


def test_hostile(words, tmp_path):
    rows = measure(words, tmp_path, "hostile")
    assert len(rows) == 5
    assert all(row["above"] == row["learning"] / row["frozen"] - 1 for row in rows.values())


def test_hostile_texts_are_what_they_are_called():
    ids = torch.arange(100, 400)
    texts = cases.hostile_texts(ids, 1000)
    assert all(len(text) == 300 for text in texts.values())
    assert torch.equal(texts["shuffled text"].sort().values, ids)
    assert len(set(texts["one token"].tolist())) == 1 and len(set(texts["a repeated sentence"].tolist())) == 40
    same = texts["text with spans of 64 random tokens"] == ids
    assert same[:64].all() and same[64:128].sum() < 5 and same[128:192].all()


@pytest.mark.processes
def test_saved(words, tmp_path):
    rows = measure(words, tmp_path, "saved")
    assert list(rows) == ["frozen", "not saved", *cases.FORMS]
    assert rows["float32"]["difference"] == 0
    sizes = [rows[form]["file_mb"] for form in cases.FORMS]
    assert sizes == sorted(sizes, reverse=True)


def test_classes(words, tmp_path, monkeypatch):
    monkeypatch.setattr(small, "STEPS", 1)
    monkeypatch.setattr(small, "SHOTS", (512, 256))
    rows = measure(words, tmp_path, "classes")
    assert all(0 <= row["accuracy"] <= 1 and row["n"] == 30 for row in rows.values())
    assert rows["learning"]["accuracy"] != rows[small.IN_CONTEXT]["accuracy"] or rows["learning"]["tokens"] > 0


def test_own(words, tmp_path):
    rows = measure(words, tmp_path, "own")
    ways = [
        small.FROZEN_MEMORIES,
        small.LIVE_MEMORIES,
        *(f"levels learn, rate x {factor}" for factor in small.FACTORS),
    ]
    assert list(rows) == [*(f"{way} {text}" for text in ("wikitext", "novel") for way in ways), small.SEARCHED]
    assert rows[small.SEARCHED]["rate"] in [0.0025 * factor for factor in small.FACTORS]


def test_window(words, tmp_path, capsys):
    rows = measure(words, tmp_path, "window")
    assert list(rows) == [f"window of {size}, {sinks} sinks" for size, sinks, _ in windows.WINDOWS]
    assert all(row["through"] > 0 and row["anew"] > 0 and len(row["process_mb"]) in (2, 3, 8) for row in rows.values())
    assert rows["window of 512, 4 sinks"]["state_mb"] < rows["window of 1024, 4 sinks"]["state_mb"]
    assert "window of 512, 4 sinks, 256 tokens: loss beyond 8K |" in capsys.readouterr().out


def test_every_case_has_lines_in_the_table_for_its_rows():
    assert table([]).count("\n") == 1
    assert list(CASES) == list(WRITERS)


def test_a_novel_begins_with_its_first_long_paragraph():
    long = "word " * 300
    assert from_first_paragraph(f"Title\n\nContents\n\n{long}\n\nend") == f"{long}\n\nend"


@pytest.mark.parametrize(
    "flags, sentence",
    [
        (["dance"], "dance is no case: name some of novel,"),
        (["novel"], "--model is missing: name a folder."),
        (["novel", "--model", "nowhere", "--data_dir", "."], "--model nowhere has no config.json"),
        (["--picture", "none.png"], "--picture: the results file has no row of the case original"),
    ],
)
def test_bad_flags_get_a_sentence(flags, sentence, capsys, tmp_path, monkeypatch):
    monkeypatch.delenv("HOPE_TEST_DATA", raising=False)
    assert main([*flags, "--results", str(tmp_path / "none.jsonl")]) == 2
    assert sentence in capsys.readouterr().err


def test_a_text_that_is_too_short_gets_a_sentence(bench):
    with pytest.raises(ValueError, match="The text wikitext has .* tokens, not 1,000,000: use --shorten"):
        bench.ids("wikitext", 1_000_000)
    with pytest.raises(ValueError, match="--data_dir: .*missing.* cannot be read"):
        Bench(bench.model, bench.data_dir / "missing", bench.novel).text("wikitext")
