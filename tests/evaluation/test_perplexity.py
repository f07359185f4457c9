"""The perplexity suite against explicit sums."""

import json
import math

import pytest
import torch

from hope_hf import frozen_memories
from hope_hf.data.encoding import make_encoder
from hope_hf.evaluation.perplexity import perplexity
from hope_hf.evaluation.streams import BLOCK, carried_scores, window_scores
from hope_hf.evaluation.subject import load_subject


def rows_of(result):
    (whole,), losses, *gains = result.tables.values()
    return whole, [{**row, **other} for row, other in zip(losses, gains[0] if gains else losses, strict=True)]


def test_the_whole_text(subject, arguments, texts):
    loaded = subject()
    whole, _ = rows_of(perplexity(arguments(batch_size=2), loaded))
    losses, hits, num_bytes = [], 0, 0
    for text in texts:
        # the file's own line ends belong to its documents
        text = text if text == texts[-1] else f"{text}\n"
        ids = torch.tensor([[loaded.start, *loaded.encode(text)]])
        scores = carried_scores(loaded.model, ids)
        losses += scores.losses[0].tolist()
        hits += int((scores.guesses == ids[:, 1:]).sum())
        num_bytes += len(text.encode())
    assert whole["documents"] == len(texts) and whole["n"] == len(losses)
    assert whole["loss"] == pytest.approx(math.fsum(losses) / len(losses), rel=1e-5)
    assert whole["perplexity"] == pytest.approx(math.exp(whole["loss"]))
    assert whole["bits_per_byte"] == pytest.approx(math.fsum(losses) / math.log(2) / num_bytes, rel=1e-5)
    assert whole["accuracy"] == pytest.approx(hits / len(losses), abs=2 / len(losses))
    assert whole["loss_stderr"] > 0
    assert whole["perplexity_stderr"] == pytest.approx(whole["perplexity"] * whole["loss_stderr"])
    # hits of one document are correlated, so the error is only of the order of a binomial's
    binomial = math.sqrt(whole["accuracy"] * (1 - whole["accuracy"]) / whole["n"])
    assert 0.2 * binomial < whole["accuracy_stderr"] < 5 * binomial


def test_a_text_that_spells_a_special_token_has_the_tokens_of_training(subject, arguments, tmp_path):
    loaded, text = subject(), "GPT-2 writes <|endoftext|> between texts. " * 4
    (tmp_path / "a.txt").write_text(text)
    (trained,) = make_encoder(loaded.tokenizer)([text])
    assert [loaded.start, *loaded.encode(text)] == trained
    found = perplexity(arguments(validation_file=str(tmp_path / "a.txt"), lengths="16"), loaded)
    whole = next(table for name, (table, *_) in found.tables.items() if name.startswith("Text: "))
    ids = torch.tensor([trained])
    with torch.no_grad():
        losses = torch.nn.functional.cross_entropy(loaded.model(ids).logits[0, :-1], ids[0, 1:], reduction="sum")
    assert whole["loss"] == pytest.approx(float(losses) / (len(trained) - 1), rel=1e-4)
    assert whole["bits_per_byte"] == pytest.approx(float(losses) / math.log(2) / len(text), rel=1e-4)


def test_every_corpus_of_a_mixture_has_a_row(subject, arguments, texts, tmp_path):
    for name, part in (("short", texts[:3]), ("long", texts[3:])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in part))
    corpora = "".join(f"  {name}: {{files: {tmp_path}/{name}.jsonl}}\n" for name in ("short", "long"))
    (tmp_path / "mix.yaml").write_text(f"corpora:\n{corpora}")
    mixed = {"dataset_mixture": str(tmp_path / "mix.yaml"), "validation_split_percentage": 50.0}
    tables = perplexity(arguments(validation_file=None, **mixed), subject()).tables
    (whole,) = tables[f"Text: {tmp_path / 'mix.yaml'}, held-out documents"]
    rows = tables["By corpus"]
    assert [row["corpus"] for row in rows] == ["short", "long"]
    for count in ("documents", "n"):
        assert whole[count] == sum(row[count] for row in rows)
    assert whole["loss"] == pytest.approx(sum(row["loss"] * row["n"] for row in rows) / whole["n"], rel=1e-6)
    for row in rows:
        corpus = {"dataset_mixture": None, "train_file": str(tmp_path / f"{row['corpus']}.jsonl")}
        ((alone,), *_) = perplexity(arguments(validation_file=None, **mixed | corpus), subject()).tables.values()
        for name in ("documents", "n", "loss", "perplexity", "bits_per_byte", "accuracy"):
            assert row[name] == pytest.approx(alone[name], rel=1e-6), name


def test_by_position_and_its_controls(subject, arguments, texts):
    loaded = subject()
    result = perplexity(arguments(lengths="100,300,600", samples_per_length=2), loaded)
    _, rows = rows_of(result)
    assert [row["positions"] for row in rows] == ["1-100", "101-300", "301-600"]
    ids = torch.tensor([loaded.encode(texts[index] + "\n")[:600] for index in (1, 3)])
    ids = torch.cat([torch.full((2, 1), loaded.start), ids], 1)
    carried = carried_scores(loaded.model, ids).losses
    with frozen_memories(loaded.model):
        frozen = carried_scores(loaded.model, ids).losses
    reset = torch.stack([window_scores(loaded.model, row, 257, 256, 4).losses for row in ids])
    windows = torch.stack([window_scores(loaded.model, row, 300, 150, 4).losses for row in ids])
    for row, (start, end) in zip(rows, [(0, 100), (100, 300), (300, 600)], strict=True):
        assert row["n"] == 2 * (end - start)
        for name, losses in {"loss": carried, "frozen": frozen, "window": windows, "reset_256": reset}.items():
            assert row[name] == pytest.approx(float(losses[:, start:end].mean()), rel=1e-5)
        assert min(row["loss"], row["frozen"]) - 0.1 < row["mixed"] < max(row["loss"], row["frozen"])
        num_bytes = sum(len(loaded.tokenizer.decode(text[start + 1 : end + 1]).encode()) for text in ids)
        assert row["bits_per_byte"] == pytest.approx(row["loss"] * row["n"] / math.log(2) / num_bytes, rel=1e-6)
        assert row["frozen_minus_loss"] == pytest.approx(row["frozen"] - row["loss"], abs=1e-5)
        assert row["state_largest"] > 0 and row["state_mib"] == rows[0]["state_mib"]
    assert rows[0]["reset_256_minus_loss"] == pytest.approx(0.0, abs=1e-6)
    assert abs(rows[2]["reset_256_minus_loss"]) > 1e-4


def test_the_largest_state_is_that_of_all_texts(subject, arguments):
    loaded, found = subject(), []
    for rows_at_a_time in (1, 3):
        options = dict(lengths="100,300", samples_per_length=3, batch_size=rows_at_a_time)
        _, rows = rows_of(perplexity(arguments(**options), loaded))
        found.append([row["state_largest"] for row in rows])
    assert found[0] == pytest.approx(found[1], rel=1e-5)


def test_standard_errors_are_those_of_blocks(subject, arguments):
    loaded = subject()
    _, (row,) = rows_of(perplexity(arguments(lengths="512", samples_per_length=1), loaded))
    assert BLOCK == 256 and row["loss_stderr"] > 0
    _, (row,) = rows_of(perplexity(arguments(lengths="200", samples_per_length=1), loaded))
    assert row["loss_stderr"] is None


def test_a_model_that_writes_nothing_gains_nothing(subject, arguments):
    loaded = subject()
    with frozen_memories(loaded.model):
        _, rows = rows_of(perplexity(arguments(lengths="100,300"), loaded))
    assert all(row["frozen_minus_loss"] == 0.0 for row in rows)


def test_attention_reads_its_positions_and_then_slides(subject, arguments):
    loaded = subject("llama")
    _, rows = rows_of(perplexity(arguments(lengths="128,256,512", samples_per_length=1), loaded))
    assert {"loss", "window", "reset_256"} <= rows[0].keys() and "frozen" not in rows[0]
    assert rows[0]["window"] == pytest.approx(rows[0]["loss"], rel=1e-5)
    _, rows = rows_of(perplexity(arguments(lengths="256,600", samples_per_length=1), loaded))
    assert "loss" not in rows[0] and rows[1]["bits_per_byte"] > 0


def test_a_model_of_few_positions_has_no_reset_control(subject, arguments):
    _, rows = rows_of(perplexity(arguments(lengths="64,128", samples_per_length=1), subject("gpt2")))
    assert {"loss", "window"} <= rows[0].keys() and "reset_256" not in rows[0]


def test_documents_longer_than_the_model_are_read_in_windows_of_all_its_positions(subject, arguments, texts):
    """A token beyond the first window sees at least half of them."""
    loaded = subject("gpt2")
    longest, losses = loaded.longest_input, []
    for text in texts:
        # the file's own line ends belong to its documents
        ids = torch.tensor([loaded.start, *loaded.encode(text if text == texts[-1] else f"{text}\n")])
        losses += window_scores(loaded.model, ids, longest, longest // 2, 1).losses.tolist()
    assert any(len(loaded.encode(text)) > longest for text in texts)
    whole, _ = rows_of(perplexity(arguments(lengths="64", samples_per_length=1), loaded))
    assert whole["loss"] == pytest.approx(math.fsum(losses) / len(losses), rel=1e-5)


def test_the_limit_holds_for_texts_by_position(subject, arguments):
    loaded = subject("llama")
    for limit, texts in ((None, 4), (2, 2)):
        _, (row,) = rows_of(perplexity(arguments(lengths="64", samples_per_length=4, limit=limit), loaded))
        assert row["n"] == 64 * texts


def test_the_curve_is_drawn(subject, arguments, tmp_path):
    for kind in ("hope", "llama"):
        result = perplexity(arguments(lengths="100,300"), subject(kind))
        file = tmp_path / f"{kind}.png"
        result.pictures["loss_by_position.png"](file)
        assert file.read_bytes().startswith(b"\x89PNG")


def test_a_length_beyond_the_text(subject, arguments):
    with pytest.raises(ValueError, match="--lengths asks for texts of 65,536 tokens, and the longest document has"):
        perplexity(arguments(lengths="64k"), subject())


def test_losses_that_are_no_numbers(subject, arguments, folders):
    broken = load_subject(arguments(model_name_or_path=folders["hope"]))
    with torch.no_grad():
        broken.model.lm_head.weight.fill_(math.nan)
    with pytest.raises(ValueError, match="losses on the text are not finite"):
        perplexity(arguments(), broken)
