"""The perplexity suite against explicit sums."""

import json
import math
from pathlib import Path

import pytest
import torch

from hope_hf import frozen_memories
from hope_hf.evaluation.perplexity import perplexity
from hope_hf.evaluation.streams import carried_scores, window_scores


def rows_of(result) -> tuple[dict, list[dict]]:
    """The row of the whole text, and the columns of both tables by position."""
    (whole,), losses, *gains = result.tables.values()
    for table in gains:
        losses = [row | more for row, more in zip(losses, table, strict=True)]
    return whole, losses


@pytest.fixture
def measured(arguments):
    """`measured(subject, **flags)` runs the suite."""
    return lambda subject, **flags: rows_of(perplexity(arguments(**flags), subject))


def documents(subject, texts: list[str]) -> list[torch.Tensor]:
    """The texts [T], each after a start token; the file's own line ends belong to its documents."""
    lines = [f"{text}\n" for text in texts[:-1]] + texts[-1:]
    return [torch.tensor([subject.start, *subject.encode(line)]) for line in lines]


def test_the_whole_text(subject, measured, texts):
    loaded = subject()
    whole, _ = measured(loaded, batch_size=2)
    losses = []
    hits = []
    for ids in documents(loaded, texts):
        scores = carried_scores(loaded.model, ids[None])
        losses += scores.losses[0].tolist()
        hits += (scores.guesses[0] == ids[1:]).tolist()
    num_bytes = len("\n".join(texts).encode())
    loss = math.fsum(losses) / len(losses)
    accuracy = sum(hits) / len(hits)
    assert whole["documents"] == len(texts) and whole["n"] == len(losses)
    assert whole["loss"] == pytest.approx(loss, rel=1e-5)
    assert whole["perplexity"] == pytest.approx(math.exp(whole["loss"]))
    assert whole["bits_per_byte"] == pytest.approx(math.fsum(losses) / math.log(2) / num_bytes, rel=1e-5)
    assert whole["accuracy"] == pytest.approx(accuracy, abs=2 / len(hits))
    assert whole["loss_stderr"] > 0
    assert whole["perplexity_stderr"] == pytest.approx(whole["perplexity"] * whole["loss_stderr"])
    # hits of one document are correlated, so the error is only of the order of a binomial's
    binomial = math.sqrt(accuracy * (1 - accuracy) / len(hits))
    assert 0.2 * binomial < whole["accuracy_stderr"] < 5 * binomial


def test_every_corpus_of_a_mixture_has_the_row_of_its_text_alone(subject, arguments, texts, tmp_path):
    files = {}
    for name, part in {"short": texts[:3], "long": texts[3:]}.items():
        files[name] = str(tmp_path / f"{name}.jsonl")
        Path(files[name]).write_text("".join(json.dumps({"text": text}) + "\n" for text in part))
    corpora = ", ".join(f"{name}: {{files: {file}}}" for name, file in files.items())
    (tmp_path / "mix.yaml").write_text(f"corpora: {{{corpora}}}")
    options = dict(validation_file=None, validation_split_percentage=50.0)
    mixed = perplexity(arguments(dataset_mixture=str(tmp_path / "mix.yaml"), **options), subject())
    for row in mixed.tables["By corpus"]:
        result = perplexity(arguments(train_file=files[row["corpus"]], **options), subject())
        (alone,), *_ = result.tables.values()
        for name in ("documents", "n", "loss", "perplexity", "bits_per_byte", "accuracy"):
            assert row[name] == pytest.approx(alone[name], rel=1e-6), name


def test_by_position_and_its_controls(subject, measured, texts):
    loaded = subject()
    _, rows = measured(loaded, lengths="100,300,600", samples_per_length=2)
    assert [row["positions"] for row in rows] == ["1-100", "101-300", "301-600"]
    long_documents = documents(loaded, texts)
    ids = torch.stack([long_documents[1][:601], long_documents[3][:601]])
    expected = {"loss": carried_scores(loaded.model, ids).losses}
    with frozen_memories(loaded.model):
        expected["frozen"] = carried_scores(loaded.model, ids).losses
    for name, window, stride in (("reset_256", 257, 256), ("window", 300, 150)):
        losses = [window_scores(loaded.model, row, window, stride, 4).losses for row in ids]
        expected[name] = torch.stack(losses)
    for row, start, end in zip(rows, (0, 100, 300), (100, 300, 600), strict=True):
        assert row["n"] == 2 * (end - start)
        for name, losses in expected.items():
            assert row[name] == pytest.approx(float(losses[:, start:end].mean()), rel=1e-5)
        assert min(row["loss"], row["frozen"]) - 0.1 < row["mixed"] < max(row["loss"], row["frozen"])
        num_bytes = sum(len(loaded.tokenizer.decode(text[start + 1 : end + 1]).encode()) for text in ids)
        assert row["bits_per_byte"] == pytest.approx(row["loss"] * row["n"] / math.log(2) / num_bytes, rel=1e-6)
        assert row["frozen_minus_loss"] == pytest.approx(row["frozen"] - row["loss"], abs=1e-5)
    assert rows[0]["reset_256_minus_loss"] == pytest.approx(0.0, abs=1e-6)
    assert abs(rows[2]["reset_256_minus_loss"]) > 1e-4


def test_attention_reads_its_positions_and_then_slides(subject, measured):
    loaded = subject("llama")
    _, rows = measured(loaded, lengths="128,256,512", samples_per_length=1)
    assert "reset_256" in rows[0] and "frozen" not in rows[0]
    assert rows[0]["window"] == pytest.approx(rows[0]["loss"], rel=1e-5)
    _, rows = measured(loaded, lengths="256,600", samples_per_length=1)
    assert "loss" not in rows[0] and rows[1]["bits_per_byte"] > 0
    _, (row,) = measured(loaded, lengths="64", samples_per_length=4, limit=2)
    assert row["n"] == 64 * 2


def test_documents_longer_than_the_model_are_read_in_windows_of_all_its_positions(subject, measured, texts):
    """A token beyond the first window sees at least half of them."""
    loaded = subject("gpt2")
    longest = loaded.longest_input
    losses = []
    for ids in documents(loaded, texts):
        losses += window_scores(loaded.model, ids, longest, longest // 2, 1).losses.tolist()
    whole, rows = measured(loaded, lengths="64,128", samples_per_length=1)
    assert whole["loss"] == pytest.approx(math.fsum(losses) / len(losses), rel=1e-5)
    # it has too few positions for that control
    assert "window" in rows[0] and "reset_256" not in rows[0]


def test_what_cannot_be_measured(subject, measured):
    loaded = subject()
    with pytest.raises(ValueError, match="--lengths"):
        measured(loaded, lengths="64k")
    with torch.no_grad():
        loaded.model.lm_head.weight.fill_(math.nan)
    with pytest.raises(ValueError, match="not finite"):
        measured(loaded)
