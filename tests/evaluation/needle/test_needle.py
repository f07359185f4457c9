"""Needles: a model that copies solves every task, a uniform one scores chance; what lies where in a sample."""

import math
import re

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast

from hope_hf.evaluation.needle.retrieval import needle, passkey
from hope_hf.evaluation.needle.samples import make_samples, noise
from hope_hf.evaluation.needle.samples import text as haystack
from hope_hf.evaluation.needle.tasks import RULER, TASKS, listed
from hope_hf.evaluation.subject import Subject

CHANCE = "Tasks, and the scores of chance"
QUESTION = re.compile(r"What (?:is|are all) the special magic \w+ for (.*?) mentioned in .* provided text (?:is|are)")
BETWEEN_KEYS = r", and |, "


class Stub(LlamaForCausalLM):
    """A model that says every token alike, and reads whole texts."""

    _is_stateful = True

    def __init__(self, subject: Subject):
        sizes = dict(hidden_size=4, intermediate_size=4, num_hidden_layers=1, num_attention_heads=1)
        super().__init__(LlamaConfig(vocab_size=len(subject.tokenizer), **sizes))
        self.subject = subject

    def prepare_inputs_for_generation(self, input_ids, **kwargs):
        return {"input_ids": input_ids}

    def forward(self, input_ids, attention_mask=None, **options):
        logits = torch.zeros(*input_ids.shape, self.config.vocab_size)
        for row, ids in zip(logits, input_ids.tolist(), strict=True):
            self.answer(row, ids)
        return CausalLMOutputWithPast(logits=logits)

    def answer(self, logits, ids):
        """Change the logits [T, V] of a text."""


class Copier(Stub):
    """Looks up what the needles say of the keys that are asked for."""

    def answer(self, logits, ids):
        text = self.subject.tokenizer.decode(ids)
        question = QUESTION.search(text)
        values = []
        for key in re.split(BETWEEN_KEYS, question[1]):
            values += re.findall(rf"magic \w+s for {key} is: ([0-9a-f-]+)\.", text)
        asked = self.subject.encode(question[0])
        start = len(ids)
        while ids[start - len(asked) : start] != asked:
            start -= 1
        for place, token in enumerate(self.subject.encode(" " + listed(values)), start - 1):
            if place < len(ids):
                logits[place, token] = 50.0


@pytest.fixture
def stubbed(tokenizer):
    """A `Subject` of a stub of that class."""

    def build(kind=Stub) -> Subject:
        made = Subject(None, tokenizer)
        made.model = kind(made).eval()
        return made

    return build


@pytest.fixture
def text(arguments, tmp_path):
    """Arguments with a text of many sentences."""
    file = tmp_path / "filler.txt"
    sentences = [f"The model number {index} reads. It writes what was said, and learns." for index in range(400)]
    file.write_text("\n\n".join(sentences))
    return lambda **options: arguments(validation_file=str(file), **options)


FAST = dict(lengths="1300", depths="0,0.5", samples_per_length=1, max_new_tokens=60)


def test_a_model_that_copies_solves_every_task(stubbed, text):
    result = needle(text(**FAST), stubbed(Copier))
    assert list(result.tables) == [CHANCE, *RULER]
    for name in RULER:
        rows = result.tables[name]
        assert [row["depth"] for row in rows] == [0, 0.5]
        for row in rows:
            assert row["generated"] == row["exact"] == 1.0 and row["loss"] < 1e-6, (name, row)


def test_a_uniform_model_scores_the_chance_that_is_printed(stubbed, text):
    loaded = stubbed()
    tables = needle(text(**FAST | dict(max_new_tokens=1)), loaded).tables
    assert [row["task"] for row in tables[CHANCE]] == list(RULER)
    for chance in tables[CHANCE]:
        for row in tables[chance["task"]]:
            assert row["loss"] == pytest.approx(chance["chance_loss"], rel=1e-6)
            assert row["generated"] == row["exact"] == 0.0
    # chance is the probability of the value
    (sample,) = make_samples(loaded, TASKS["s-niah-1"], noise(loaded, 1300), 1300, 0.0, range(42, 43))
    tokens = len(loaded.encode(f" {sample.values[0]}"))
    chance = tables[CHANCE][0]
    assert chance["chance"] == pytest.approx(math.exp(-chance["chance_loss"] * tokens))


@pytest.mark.parametrize("name", RULER)
@pytest.mark.parametrize("depth", [0.0, 0.3, 1.0])
def test_what_lies_where(stubbed, text, name, depth):
    loaded = stubbed()
    task = TASKS[name]
    around = noise(loaded, 2000) if task.haystack == "noise" else haystack(loaded, 2000, text())
    samples = make_samples(loaded, task, around, 2000, depth, range(2))
    assert samples == make_samples(loaded, task, around, 2000, depth, range(2))
    assert samples[0].values != samples[1].values
    assert max(len(sample.prompt) + len(sample.answer) for sample in samples) == 2000
    for sample in samples:
        prompt = loaded.tokenizer.decode(sample.prompt)
        assert loaded.tokenizer.decode(sample.answer) == f" {listed(sample.values)}"
        assert len(set(sample.values)) == task.answers
        for span, value in zip(sample.spans, sample.values, strict=True):
            assert loaded.tokenizer.decode(sample.answer[span]) == f" {value}"
        assert prompt.count("One of the special magic") == task.needles
        asked = QUESTION.search(prompt)[1]
        assert len(re.split(BETWEEN_KEYS, asked)) == task.queries
        places = [prompt.index(f"{value}.") for value in sample.values]
        if task.values > 1:
            assert places == sorted(places)
        else:
            begin, end = prompt.index("afterwards."), prompt.rindex("What ")
            assert (places[0] - begin) / (end - begin) == pytest.approx(depth, abs=0.1)


def test_only_a_model_that_forgets_the_needle_has_equal_losses_at_two_lengths(learner, arguments):
    """Question and answer are the same at all lengths, so what a window of 24 tokens reads is equal, too."""
    args = arguments(lengths="320,480", depths="0", samples_per_length=1, max_new_tokens=1, tasks="s-niah-1")
    for kind in ("window", "attention", "memories"):
        short, long = needle(args, learner(kind)).tables["s-niah-1"]
        difference = abs(long["loss"] - short["loss"])
        if kind == "window":
            assert difference < 1e-5
        else:
            assert difference > 1e-4
        assert ("frozen" in short) == (kind == "memories")


def test_what_cannot_be_asked(stubbed, text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "short.txt").write_text("A short text. It ends.")
    for flags, words in (
        (dict(tasks="s-nia-1"), "--tasks s-nia-1 .*s-niah-1"),
        (dict(tasks=","), "--tasks"),
        (dict(tasks="mk-niah-1", lengths="100,1k"), "--lengths .*mk-niah-1"),
        (dict(tasks="s-niah-2", validation_file="short.txt"), "--lengths .*short.txt"),
        (dict(tasks="passkey", lengths="20"), "--lengths .*passkey"),
    ):
        args = text()
        vars(args).update(flags)
        with pytest.raises(ValueError, match=words):
            needle(args, stubbed())


def test_scores_of_an_answer():
    # all expected strings count wherever they stand; a pass key must come first
    assert TASKS["mq-niah"].score("they are ABC and 12", ["abc", "34"]) == 0.5
    for text, score in ((" 12345", 1.0), ("12399", 0.0), ("is 12345", 0.0)):
        assert TASKS["passkey"].score(text, ["12345"]) == score


@pytest.mark.parametrize("kind", ["hope", "llama", "gpt2"])
def test_an_untrained_model_finds_no_pass_key(subject, arguments, kind):
    """A text of 160 tokens is as long as GPT-2's positions."""
    loaded = subject(kind)
    (row,) = passkey(arguments(lengths="160", depths="0.5", samples_per_length=2), loaded).tables["Passkey"]
    assert row["exact"] == row["generated"] == 0.0 and row["loss"] > 1.0
    assert ("frozen" in row) == (kind == "hope")
    if kind == "llama":
        with pytest.raises(ValueError, match="512 positions"):
            passkey(arguments(lengths="1k"), loaded)
        with torch.no_grad():
            loaded.model.lm_head.weight.fill_(float("nan"))
        with pytest.raises(ValueError, match="not finite"):
            passkey(arguments(lengths="160", depths="0.5", samples_per_length=1), loaded)
