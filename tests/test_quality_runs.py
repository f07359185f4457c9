"""benchmarks/quality.py as a program: texts, two real runs of a few steps, and its error messages."""

import json
import random

import pytest

from benchmarks import quality
from benchmarks.quality_models import SIZES, Size
from benchmarks.quality_texts import book, part, prepare

pytestmark = [pytest.mark.benchmarks, pytest.mark.usefixtures("warm_python")]

MICRO = Size(128, 2, 320, 4, 112, 669_000, 4, 3, (1e-3,), block_size=32, per_device_train_batch_size=2)
VECTORS = ["--vector_learning_rates", "0.03"]


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


def test_two_runs_are_trained_recorded_and_not_repeated(tmp_path, data_dir, monkeypatch, capsys):
    monkeypatch.setitem(SIZES, "micro", MICRO)
    words = ["--output_dir", tmp_path / "out", "--data_dir", data_dir, "--sizes", "micro"]
    words += ["--texts", "tinyshakespeare", "--search_text", "tinyshakespeare", "--models", "hope", "llama_conv"]
    words = list(map(str, words))
    assert quality.main([*words, "--plan"]) == 0
    assert "2 runs" in capsys.readouterr().out and not (tmp_path / "out/results.jsonl").exists()

    assert quality.main(words) == 0
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

    assert quality.main(words) == 0
    assert "start" not in capsys.readouterr().out
    assert quality.main([*words, "--learning_rates", "1e-3", "--seeds", "1", "2", "--plan"]) == 0
    assert "learning rate 0.001, seed 2\n2 runs" in capsys.readouterr().out
    for other, heading in ((["--max_train_steps", "5"], "320 tokens: "), (VECTORS, "192 tokens: ")):
        assert quality.main([*words, *other, "--report"]) == 0
        shown = capsys.readouterr().out
        assert heading in shown and "Left out: 2 runs" in shown and f"{rows[0]['eval_loss']:.4f}" not in shown

    hope_alone = words[:-1]
    assert quality.main([*hope_alone, *VECTORS]) == 0
    third = json.loads((tmp_path / "out/results.jsonl").read_text().splitlines()[2])
    assert third["vector_learning_rate"] == 0.03 and rows[0]["vector_learning_rate"] is None
    assert "| hope | " in (shown := capsys.readouterr().out) and "| 0.001, vectors 0.03 |" in shown
    assert third["eval_loss"] != next(row for row in rows if row["model"] == "hope")["eval_loss"]


def test_a_run_that_fails_is_reported_and_recorded_nowhere(tmp_path, data_dir, monkeypatch, capsys):
    monkeypatch.setitem(SIZES, "micro", MICRO)
    # A program that fails with a sentence, as run_clm.py does.
    program = tmp_path / "program.py"
    program.write_text("import sys\nprint('error: no training today')\nsys.exit(2)\n")
    monkeypatch.setattr("benchmarks.quality_runs.PROGRAM", program)
    words = ["--output_dir", tmp_path / "out", "--data_dir", data_dir, "--sizes", "micro", "--models", "llama"]
    words += ["--texts", "tinyshakespeare", "--search_text", "tinyshakespeare"]
    assert quality.main(list(map(str, words))) == 1
    assert "error: no training today" in capsys.readouterr().out
    assert not (tmp_path / "out/results.jsonl").exists()


def test_mistakes_are_one_sentence(tmp_path, data_dir, monkeypatch, capsys):
    monkeypatch.delenv("HOPE_TEST_DATA", raising=False)

    def says(*words: str) -> str:
        assert quality.main(["--output_dir", str(tmp_path / "out"), *words]) == 2
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
        quality.lock_folder(lock, tmp_path)
        assert "in use" in says("--texts", "builtin")


def test_missing_texts_are_left_out_where_none_was_named(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("HOPE_TEST_DATA", raising=False)
    assert quality.main(["--output_dir", str(tmp_path), "--sizes", "small", "--models", "llama", "--plan"]) == 0
    shown = capsys.readouterr()
    assert shown.err.count("left out: ") == 2 and "small builtin llama" in shown.out and "moby" not in shown.out
