"""The suite `recall`: texts that state facts, scores of answers by hand, and a run of it."""

from dataclasses import replace

import pytest
import torch

from hope_hf import HopeCache
from hope_hf.data import plain_ids, train_tokenizer
from hope_hf.evaluation.flags import Arguments
from hope_hf.evaluation.recall import facts as facts_module
from hope_hf.evaluation.recall import suite
from hope_hf.evaluation.recall.answers import Answers, answers_of
from hope_hf.evaluation.recall.facts import make_facts, text_with_facts
from hope_hf.evaluation.recall.kinds import FACTS_OF_A_KIND, KINDS
from hope_hf.evaluation.report import as_markdown
from hope_hf.evaluation.subject import Subject

NOVEL = "\n\n".join(f"It rained for {days} days, and nobody left the house." for days in range(2000))


def test_kinds_have_all_that_a_fact_needs():
    for kind in KINDS:
        assert len(set(kind.answers)) == FACTS_OF_A_KIND
        assert kind.wordings[0].endswith(" {a}.")
        assert all("{s}" in text and "{a}" in text for text in kind.wordings)
        assert "{s}" in kind.question and "{s}" in kind.paraphrase
        assert len(kind.descriptions) in (0, FACTS_OF_A_KIND)


def test_facts_of_a_seed():
    facts = make_facts(3)
    assert facts == make_facts(3) != make_facts(4)
    assert len(facts) == len(KINDS) * FACTS_OF_A_KIND
    for index in range(len(KINDS)):
        of_kind = [fact for fact in facts if fact.kind == index]
        assert {fact.answer for fact in of_kind} == set(KINDS[index].answers)
        assert sorted(len(fact.statements) for fact in of_kind) == [1, 1, 3, 3]
        for fact in of_kind:
            assert fact.statements[0] == f"{fact.cloze} {fact.answer}."


def test_text_states_every_fact_before_its_tail(tokenizer):
    text = text_with_facts(tokenizer, NOVEL, length=9000, seed=0, tail=1000)
    assert len(text.ids) == 9000
    whole = tokenizer.decode(text.ids)
    end = tokenizer.decode(text.ids[-1000:])
    for fact, stop in zip(text.facts, text.stops, strict=True):
        assert all(whole.count(statement) == 1 for statement in fact.statements)
        assert not any(statement in end for statement in fact.statements)
        assert tokenizer.decode(text.ids[:stop]).endswith(fact.statements)


def test_texts_that_are_too_short_are_refused(tokenizer):
    with pytest.raises(ValueError, match="need"):
        text_with_facts(tokenizer, NOVEL, length=1000, seed=0)
    with pytest.raises(ValueError, match="shorter"):
        text_with_facts(tokenizer, NOVEL[:200], length=9000, seed=0)


def test_right_answers_and_ties_by_hand():
    answers = Answers(torch.tensor([[-1.0, -2.0, -9.0], [-1.5, -3.0, -4.0], [-5.0, -6.0, -3.0]]), torch.ones(3))
    assert answers.right().tolist() == [True, False, True]
    assert answers.ties().tolist() == [-1.0 - (-1.5 - 5.0) / 2, -3.0 - (-2.0 - 6.0) / 2, -3.0 - (-9.0 - 4.0) / 2]


@torch.no_grad()
def test_scores_are_those_of_whole_texts(tiny_model, tokenizer):
    model = tiny_model(vocab_size=len(tokenizer))
    ids = plain_ids(tokenizer, "The king likes soup.")
    cache = HopeCache(model.config)
    model(torch.tensor([ids]), cache=cache)
    prompts = ["The king likes", "The king has a"]
    options = ["soup", "heron"]
    measured = answers_of(model, tokenizer, cache, prompts, options)
    for row, prompt in enumerate(prompts):
        for column, option in enumerate(options):
            before = ids + plain_ids(tokenizer, prompt)
            answer = plain_ids(tokenizer, f" {option}")
            logits = model(torch.tensor([before + answer[:-1]])).logits[0, len(before) - 1 :]
            expected = logits.log_softmax(-1)[range(len(answer)), answer].sum()
            assert measured.log_probs[row, column] == pytest.approx(float(expected), abs=1e-4)
            if row == column:
                assert bool(measured.greedy[row]) == (logits.argmax(-1).tolist() == answer)
    assert cache.get_seq_length() == len(ids)


def test_suite_has_a_row_for_every_reading(tiny_model, tmp_path, monkeypatch):
    """Two kinds of facts, one of them with names."""
    kinds = KINDS[0], KINDS[-1]
    monkeypatch.setattr(facts_module, "KINDS", kinds)
    novel = tmp_path / "novel.txt"
    novel.write_text(NOVEL)
    words = [statement for fact in make_facts(0) for statement in fact.statements]
    tokenizer = train_tokenizer([NOVEL[:5000], *words], 600)
    kinds = ["hope_memory", "window_attention", "retaining_attention"]
    window = dict(layer_types=kinds, num_hidden_layers=3, sliding_window=512, max_position_embeddings=20_000)
    model = tiny_model(vocab_size=len(tokenizer), level_learning={"periods": [64, 256]}, **window)
    # full attention has no positions for the second length
    monkeypatch.setattr(suite, "_fits", lambda reading, length: reading.name != "full" or length < 3000)
    args = Arguments(validation_file=str(novel), lengths="2k,3k", samples_per_length=1)
    result = suite.recall(args, Subject(model, tokenizer))
    answers, passages, losses = result.tables.values()
    assert tuple(dict.fromkeys(row["reading"] for row in answers)) == suite.READINGS
    assert all(row["n"] == 2 * FACTS_OF_A_KIND for row in answers)
    found = {row["form"]: row["found"] for row in passages if row["length"] == 2048}
    assert found["cloze"] == found["question"] == 1
    # the names alone stand in the paraphrases
    assert found["paraphrase"] >= 0.5
    assert [row["reading"] for row in losses] == ["read", "frozen", "learn", "full", "read", "frozen", "learn"]
    # without passages
    alone = suite.recall(replace(args, tasks="read", lengths="2k"), Subject(model, tokenizer))
    assert "passages" not in as_markdown("recall", alone).lower() and len(alone.tables) == 2
    result.pictures["recall.png"](tmp_path / "recall.png")
    assert (tmp_path / "recall.png").stat().st_size
