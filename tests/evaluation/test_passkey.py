"""The pass key: its place in the text, and when an answer is right."""

import pytest
import torch

from hope_hf.evaluation import passkey as suite
from hope_hf.evaluation.passkey import FILLER, make_sample, passkey
from hope_hf.evaluation.streams import Scores


@pytest.mark.parametrize("length", [150, 256, 1000])
@pytest.mark.parametrize("depth", [0.0, 0.5, 1.0])
def test_samples_have_their_length_and_depth(subject, length, depth):
    loaded = subject()
    prompt, answer, key = make_sample(loaded, length, depth, seed=3)
    text = loaded.tokenizer.decode(prompt, skip_special_tokens=True)
    assert len(prompt) + len(answer) == length and prompt[0] == loaded.start
    assert loaded.tokenizer.decode(answer) == f" {key}" and len(key) == 5
    assert text.count(key) == 2 and text.endswith("The pass key is")
    before, _, after = text.partition("The pass key is")
    after = after[: after.index("What is")]
    assert (len(before) == 0) == (depth == 0.0)
    assert (FILLER[:20] in after) == (depth < 1.0)


def test_keys_differ_by_seed_and_repeat(subject):
    keys = [make_sample(subject(), 200, 0.5, seed)[2] for seed in (1, 2, 3, 1)]
    assert len(set(keys)) == 3 and keys[0] == keys[3]


def test_scores_of_one_who_knows(subject, arguments, monkeypatch):
    loaded = subject()

    def knows(model, input_ids, *rest):
        return Scores(torch.zeros(input_ids.shape[0], input_ids.shape[1] - 1), input_ids[:, 1:].clone())

    monkeypatch.setattr(suite, "carried_scores", knows)
    rows = passkey(arguments(lengths="200,256", depths="0,1", samples_per_length=3), loaded).tables["Passkey"]
    assert [(row["length"], row["depth"], row["n"]) for row in rows] == [
        (200, 0.0, 3), (200, 1.0, 3), (256, 0.0, 3), (256, 1.0, 3)
    ]  # fmt: skip
    assert all(row["exact"] == 1.0 and row["loss"] == 0.0 for row in rows)

    def errs_in_the_last_digit(model, input_ids, *rest):
        scores = knows(model, input_ids)
        scores.guesses[0, -1] += 1
        return scores

    monkeypatch.setattr(suite, "carried_scores", errs_in_the_last_digit)
    rows = passkey(arguments(lengths="200", depths="0", samples_per_length=4, batch_size=4), loaded).tables["Passkey"]
    assert rows[0]["exact"] < 1.0


def test_an_untrained_model_knows_nothing(subject, arguments, tmp_path):
    for kind in ("hope", "llama"):
        result = passkey(arguments(lengths="160", depths="0.5", samples_per_length=2), subject(kind))
        (row,) = result.tables["Passkey"]
        assert row["exact"] == row["generated"] == 0.0 and row["loss"] > 1.0
        assert ("frozen" in row) == (kind == "hope")
        for name, draw in result.pictures.items():
            draw(tmp_path / name)
            assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_a_text_as_long_as_the_models_positions(subject, arguments):
    loaded = subject("gpt2")
    (row,) = passkey(arguments(lengths="160", depths="0.5", samples_per_length=1), loaded).tables["Passkey"]
    assert row["n"] == 1 and row["generated"] == 0.0
    # a tokenizer with longer tokens leaves fewer of the positions to the answer
    assert suite._generate(loaded, torch.full((1, 157), loaded.start), ["12345"]) == [0.0]


def test_losses_that_are_no_numbers(subject, arguments):
    broken = subject("llama")
    with torch.no_grad():
        broken.model.lm_head.weight.fill_(float("nan"))
    with pytest.raises(ValueError, match="passkey: the model's losses are not finite"):
        passkey(arguments(lengths="160", depths="0.5", samples_per_length=1), broken)


def test_generated_answers_are_compared_as_text(subject, monkeypatch):
    loaded = subject()
    prompts = torch.ones(2, 4, dtype=torch.long)
    said = [loaded.encode(" 12345"), loaded.encode(" 12399")]
    size = max(map(len, said))
    tokens = torch.tensor([ids + [loaded.start] * (size - len(ids)) for ids in said])
    monkeypatch.setattr(loaded.model, "generate", lambda ids, **options: torch.cat([ids, tokens], 1))
    assert suite._generate(loaded, prompts, ["12345", "12345"]) == [1.0, 0.0]


def test_lengths_that_do_not_serve(subject, arguments):
    with pytest.raises(ValueError, match="--lengths 20 is too short .* give at least"):
        passkey(arguments(lengths="20"), subject())
    with pytest.raises(ValueError, match="the model has 512 positions"):
        passkey(arguments(lengths="1k"), subject("llama"))
