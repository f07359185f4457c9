"""Needles: a model that copies solves every task, a uniform one scores chance; what lies where in a sample."""

import math
import re

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast

from hope_hf.evaluation.needle.retrieval import needle, passkey
from hope_hf.evaluation.needle.samples import NOISE, filler, make_samples, noise
from hope_hf.evaluation.needle.samples import text as haystack
from hope_hf.evaluation.needle.tasks import RULER, TASKS, listed
from hope_hf.evaluation.streams import Scores
from hope_hf.evaluation.subject import Subject

CHANCE = "Tasks, and the scores of chance"
QUESTION = re.compile(r"What (?:is|are all) the special magic \w+ for (.*?) mentioned in .* provided text (?:is|are)")


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
        for key in re.split(r", and |, ", question[1]):
            values += re.findall(rf"magic \w+s for {key} is: ([0-9a-f-]+)\.", text)
        asked = self.subject.encode(question[0])
        start = next(i for i in range(len(ids), 0, -1) if ids[i - len(asked) : i] == asked)
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
    assert chance["chance"] == pytest.approx(math.exp(-chance["chance_loss"] * tokens)) and tokens > 1


@pytest.mark.parametrize("name", RULER)
@pytest.mark.parametrize("depth", [0.0, 0.3, 1.0])
def test_what_lies_where(stubbed, text, name, depth):
    loaded, task = stubbed(), TASKS[name]
    around = noise(loaded, 2000) if task.haystack == "noise" else haystack(loaded, 2000, text())
    samples = make_samples(loaded, task, around, 2000, depth, range(3))
    assert samples == make_samples(loaded, task, around, 2000, depth, range(3))
    assert len({len(sample.prompt) for sample in samples}) == 1 and samples[0].values != samples[1].values
    assert max(len(sample.prompt) + len(sample.answer) for sample in samples) == 2000
    for sample in samples:
        prompt = loaded.tokenizer.decode(sample.prompt)
        assert loaded.tokenizer.decode(sample.answer) == f" {listed(sample.values)}"
        assert len(set(sample.values)) == task.answers
        for span, value in zip(sample.spans, sample.values, strict=True):
            assert loaded.tokenizer.decode(sample.answer[span]) == f" {value}"
        before, *needles = prompt.split("One of the special magic")
        assert len(needles) == task.needles
        if (name, depth) == ("s-niah-2", 0.3):
            # a needle stands between sentences
            after = needles[0].partition(". ")[2]
            assert before.rstrip().endswith(".") and after.startswith(("The model", "It writes"))
        asked = QUESTION.search(prompt)[1]
        assert len(re.split(", and |, ", asked)) == task.queries
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
        assert difference < 1e-5 if kind == "window" else difference > 1e-4


def test_memories_have_a_frozen_control_and_pictures(subject, text, tmp_path):
    args = text(lengths="320", depths="0,1", samples_per_length=1, max_new_tokens=1, tasks="s-niah-1,s-niah-2")
    result = needle(args, subject())
    assert list(result.tables) == [CHANCE, "s-niah-1", "s-niah-2"]
    for row in result.tables["s-niah-2"]:
        assert row["frozen"] != row["loss"] and "frozen_exact" in row
    assert list(result.pictures) == ["needle_s-niah-1.png", "needle_s-niah-2.png"]
    for name, draw in result.pictures.items():
        draw(tmp_path / name)
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (dict(tasks="s-nia-1"), "--tasks s-nia-1 .*did you mean s-niah-1?"),
        (dict(tasks=","), "--tasks"),
        (dict(tasks="mk-niah-1", lengths="100,1k"), "--lengths .* of mk-niah-1"),
        (dict(tasks="s-niah-2", validation_file="short.txt"), "--lengths .*short.txt"),
        (dict(tasks="passkey", lengths="20"), "--lengths .* of passkey"),
    ],
)
def test_what_cannot_be_asked(stubbed, text, tmp_path, monkeypatch, flags, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "short.txt").write_text("A short text. It ends.")
    args = text()
    for name, value in flags.items():
        setattr(args, name, value)
    with pytest.raises(ValueError, match=words):
        needle(args, stubbed())


def test_scores_of_an_answer():
    # all expected strings count wherever they stand; a pass key must come first
    assert TASKS["mq-niah"].score("they are ABC and 12", ["abc", "34"]) == 0.5
    score = TASKS["passkey"].score
    assert [score(text, ["12345"]) for text in (" 12345", "12399", "is 12345")] == [1.0, 0.0, 0.0]


# Pass keys.


@pytest.mark.parametrize("length", [150, 1000])
@pytest.mark.parametrize("depth", [0.0, 0.5, 1.0])
def test_a_pass_key_has_its_length_and_depth(stubbed, length, depth):
    loaded = stubbed()
    found = filler(loaded, length)
    first, other = make_samples(loaded, TASKS["passkey"], found, length, depth, range(3, 5))
    assert make_samples(loaded, TASKS["passkey"], found, length, depth, range(3, 4)) == [first] != [other]
    (key,) = first.values
    prompt = loaded.tokenizer.decode(first.prompt, skip_special_tokens=True)
    assert len(first.prompt) + len(first.answer) == length and first.prompt[0] == loaded.start
    assert loaded.tokenizer.decode(first.answer) == f" {key}" and len(key) == 5
    assert prompt.count(key) == 2 and prompt.endswith("The pass key is")
    before, _, after = prompt.partition("The pass key is")
    after = after[: after.index("What is")]
    assert (before == "") == (depth == 0.0) and (NOISE[:20] in after) == (depth < 1.0)


def test_pass_keys_of_a_model_that_copies_and_of_one_that_errs_once(subject, arguments, monkeypatch):
    errors = []

    def copies(model, input_ids, *rest):
        guesses = input_ids[:, 1:].clone()
        if errors:
            guesses[0, -1] += 1
        return Scores(torch.zeros(guesses.shape), guesses)

    monkeypatch.setattr("hope_hf.evaluation.needle.retrieval.carried_scores", copies)
    args = arguments(lengths="200,256", depths="0,1", samples_per_length=2)
    rows = passkey(args, subject()).tables["Passkey"]
    places = [(row["length"], row["depth"], row["n"]) for row in rows]
    assert places == [(200, 0.0, 2), (200, 1.0, 2), (256, 0.0, 2), (256, 1.0, 2)]
    assert all(row["exact"] == 1.0 and row["loss"] == 0.0 for row in rows)
    errors.append("in the last digit")
    assert passkey(args, subject()).tables["Passkey"][0]["exact"] < 1.0


@pytest.mark.parametrize("kind", ["hope", "llama", "gpt2"])
def test_an_untrained_model_finds_no_pass_key(subject, arguments, kind):
    """A text of 160 tokens is as long as GPT-2's positions."""
    loaded = subject(kind)
    (row,) = passkey(arguments(lengths="160", depths="0.5", samples_per_length=2), loaded).tables["Passkey"]
    assert row["exact"] == row["generated"] == 0.0 and row["loss"] > 1.0 and ("frozen" in row) == (kind == "hope")
    if kind == "gpt2":
        # A tokenizer with longer tokens leaves fewer of the positions to the answer.
        assert len(loaded.encode(loaded.continued(torch.full((1, 157), loaded.start), 6)[0])) <= 3
    if kind == "llama":
        with pytest.raises(ValueError, match="the model has 512 positions"):
            passkey(arguments(lengths="1k"), loaded)
        with torch.no_grad():
            loaded.model.lm_head.weight.fill_(float("nan"))
        with pytest.raises(ValueError, match="passkey: the model's losses are not finite"):
            passkey(arguments(lengths="160", depths="0.5", samples_per_length=1), loaded)
