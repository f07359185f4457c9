"""`hope-hf generate`: the text alone on standard output, its memory, and converted and exported models in both."""

import json
import sys

import pytest
import torch

from hope_hf import HopeCache

GREEDY = ["--do_sample", "false"]


def written(model, ids: list[int], **options) -> list[int]:
    """What transformers' `generate` writes after the tokens, without the program."""
    return model.generate(torch.tensor([ids]), max_new_tokens=6, do_sample=False, **options)[0, len(ids) :].tolist()


@pytest.mark.parametrize("piped", [False, True])
def test_the_continuation_alone_goes_to_standard_output(complete, model, tokenizer, piped):
    text = "w10 w11 w12"
    given = {"typed": f"{text}\n"} if piped else {}
    status, out, errors = complete(*([] if piped else ["--prompt", text]), *GREEDY, **given)
    found = written(model, tokenizer(text)["input_ids"])
    assert (status, out) == (0, f"{tokenizer.decode(found, skip_special_tokens=True)}\n")
    assert f"tokens per second: 3 read and {len(found)} written" in errors and "MB, grows with every token" in errors


def test_a_continuation_that_cannot_be_printed_ends_in_a_sentence(complete, monkeypatch, tmp_path):
    """The text is the work, and what was read is kept."""
    with open("/dev/full", "w", encoding="utf-8") as device:
        monkeypatch.setattr(sys, "stdout", device)
        monkeypatch.setattr(sys, "__stdout__", device)
        status, _, errors = complete("--prompt", "w10 w11", *GREEDY, "--memory", tmp_path / "memory")
    assert status == 1 and "error: the result was not written to standard output" in errors
    assert (tmp_path / "memory").is_dir()


def test_a_memory_goes_on_where_it_was_and_is_read_by_chat(complete, chat, model, tokenizer, tmp_path):
    words = ["--memory", tmp_path / "m", *GREEDY]
    assert complete("--prompt", "w10 w11", *words)[0] == 0
    first = [10, 11, *written(model, [10, 11]), 12, 13]
    second = written(model, first)
    assert complete("--prompt", "w12 w13", *words)[1].strip() == tokenizer.decode(second, skip_special_tokens=True)
    cache = HopeCache.from_pretrained(tmp_path / "m", model)
    # `generate` does not read the last token that it writes
    assert cache.get_seq_length() == len(first) + len(second) - 1
    assert json.loads((tmp_path / "m" / "chat.json").read_text())["messages"] == []
    assert f"read     {cache.get_seq_length()} tokens" in chat("--memory", tmp_path / "m", typed="/state")[1]


def test_sampling_flags_are_those_of_transformers(complete, model, tokenizer):
    plain = complete("--prompt", "w10", *GREEDY)[1]
    drawn = ["--prompt", "w10", "--temperature", "5"]
    assert complete(*drawn, "--seed", "1")[1] != complete(*drawn, "--seed", "2")[1]
    for alone in (["--top_k", "1"], ["--min_p", "1"], ["--top_p", "0.0001"]):
        assert complete(*drawn, *alone)[1] == plain
    found = written(model, [10], repetition_penalty=50.0)
    assert complete("--prompt", "w10", *GREEDY, "--repetition_penalty", "50")[1].strip() == tokenizer.decode(found)


def test_an_empty_text_is_answered_with_the_flag(complete):
    status, _, errors = complete(typed="\n")
    assert status == 2 and "the text is empty: give --prompt TEXT" in errors


def test_mistakes_are_one_sentence(complete):
    for words, match in (
        (["--top_k", "2", "--do_sample", "false"], "--top_k"),
        (["--learn_generated"], "--learn"),
        (["--memory_dtype", "int8"], "--memory FOLDER"),
        (["--prompt", " "], "--prompt"),
        (["--file", "x"], "--file"),
        (["--prompt", "w10", "--device", "meta"], "--device meta"),
    ):
        status, out, errors = complete(*words)
        assert status == 2 and out == "" and match in errors and errors.count("error: ") == 1, words


def test_models_of_other_programs_talk_and_remember(converted, exported, complete, chat, tmp_path):
    for model in (converted, exported):
        words = ["--memory", tmp_path / model.name, *GREEDY]
        assert complete("--prompt", "w10 w11", *words, model=model)[0] == 0
        status, out, errors = chat(*words, typed="w12 w13\n/undo\n/state\nw12 w13", model=model)
        answers = [line for line in out.splitlines() if line.startswith("w")]
        assert status == 0 and len(answers) == 2 and answers[0] == answers[1], errors
        assert "Back at 7 tokens" in errors and "Saved" in errors
