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
from hope_hf.evaluation.suites import with_own_tasks

CHANCE = "Tasks, and the scores of chance"
QUESTION = re.compile(r"What (?:is|are all) the special magic \w+ for (.*?) mentioned in .* provided text (?:is|are)")


class Stub(LlamaForCausalLM):
    """A model without weights of use, which reads whole texts."""

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
        keys = re.split(r", and |, ", question[1])
        values = [value for key in keys for value in re.findall(rf"magic \w+s for {key} is: ([0-9a-f-]+)\.", text)]
        tokens = self.subject.encode(" " + listed(values))
        asked = self.subject.encode(question[0])
        start = next(i for i in range(len(ids), 0, -1) if ids[i - len(asked) : i] == asked)
        for offset, token in enumerate(tokens):
            if start - 1 + offset < len(ids):
                logits[start - 1 + offset, token] = 50.0


@pytest.fixture
def stubbed(subject):
    """A `Subject` of a stub of that class."""
    tokenizer = subject().tokenizer

    def build(kind) -> Subject:
        made = Subject(None, tokenizer)
        made.model = kind(made).eval()
        return made

    return build


@pytest.fixture
def text(arguments, tmp_path):
    """Arguments with a text of many sentences."""
    file = tmp_path / "filler.txt"
    file.write_text(
        "\n\n".join(f"The model number {index} reads. It writes what was said, and learns." for index in range(400))
    )
    return lambda **options: arguments(validation_file=str(file), **options)


FAST = dict(lengths="1300", depths="0,0.5", samples_per_length=2, max_new_tokens=60)


def test_a_model_that_copies_solves_every_task(stubbed, text):
    result = needle(text(**FAST), stubbed(Copier))
    assert list(result.tables) == [CHANCE, *RULER]
    for name in RULER:
        rows = result.tables[name]
        assert [row["depth"] for row in rows] == [0, 0.5]
        for row in rows:
            assert row["generated"] == row["exact"] == 1.0 and row["loss"] < 1e-6, (name, row)


def test_a_uniform_model_scores_the_chance_that_is_printed(stubbed, text):
    result = needle(text(**FAST), stubbed(Stub))
    chances = {row["task"]: row for row in result.tables[CHANCE]}
    assert list(chances) == list(RULER)
    for name in RULER:
        for row in result.tables[name]:
            assert row["loss"] == pytest.approx(chances[name]["chance_loss"], rel=1e-6)
            assert row["generated"] == row["exact"] == 0.0


def test_chance_is_the_probability_of_the_values_under_a_uniform_model(stubbed, text):
    loaded = stubbed(Stub)
    (row,) = needle(text(tasks="s-niah-1", samples_per_length=1, max_new_tokens=1), loaded).tables[CHANCE]
    found = noise(loaded, 1300)
    (sample,) = make_samples(loaded, TASKS["s-niah-1"], found, 1300, 0.0, range(42, 43))
    tokens = len(loaded.encode(f" {sample.values[0]}"))
    assert row["chance"] == pytest.approx(math.exp(-row["chance_loss"] * tokens)) and tokens > 1


@pytest.mark.parametrize("name", RULER)
@pytest.mark.parametrize("depth", [0.0, 0.3, 1.0])
def test_what_lies_where(stubbed, text, name, depth):
    loaded, task = stubbed(Stub), TASKS[name]
    around = noise(loaded, 2000) if task.haystack == "noise" else haystack(loaded, 2000, text())
    samples = make_samples(loaded, task, around, 2000, depth, range(3))
    assert len({len(sample.prompt) for sample in samples}) == 1
    assert max(len(sample.prompt) + len(sample.answer) for sample in samples) == 2000
    for sample in samples:
        prompt, answer = loaded.tokenizer.decode(sample.prompt), loaded.tokenizer.decode(sample.answer)
        assert answer == f" {listed(sample.values)}" and len(set(sample.values)) == task.answers
        assert [loaded.tokenizer.decode(sample.answer[span]) for span in sample.spans] == [
            f" {value}" for value in sample.values
        ]
        assert prompt.count("One of the special magic") == task.needles
        (asked,) = re.findall("What is the special magic .* for (.*?) men|What are all .* for (.*?) men", prompt)
        assert len(re.split(", and |, ", asked[0] or asked[1])) == task.queries
        places = [prompt.index(f"{value}.") for value in sample.values]
        if task.values > 1:
            assert places == sorted(places)
        else:
            begin, end = prompt.index("afterwards."), prompt.rindex("What ")
            assert (places[0] - begin) / (end - begin) == pytest.approx(depth, abs=0.1)


def test_a_needle_stands_between_sentences(stubbed, text):
    loaded = stubbed(Stub)
    around = haystack(loaded, 1500, text())
    (sample,) = make_samples(loaded, TASKS["s-niah-2"], around, 1500, 0.5, range(1))
    before, _, after = loaded.tokenizer.decode(sample.prompt).partition("One of the special magic")
    assert before.rstrip().endswith(".") and after.partition(". ")[2].startswith(("The model", "It writes"))


def test_samples_repeat_with_their_seed_and_differ_otherwise(stubbed):
    loaded = stubbed(Stub)
    around = noise(loaded, 1000)
    samples = make_samples(loaded, TASKS["s-niah-1"], around, 1000, 0.5, range(2))
    assert samples == make_samples(loaded, TASKS["s-niah-1"], around, 1000, 0.5, range(2))
    assert samples[0].values != samples[1].values


def test_only_a_model_that_forgets_the_needle_has_equal_losses_at_two_lengths(learner, arguments):
    """Question and answer are the same at all lengths, so what a window of 24 tokens reads is equal, too."""

    def losses(kind: str) -> list[float]:
        args = arguments(lengths="320,480", depths="0", samples_per_length=1, max_new_tokens=1, tasks="s-niah-1")
        return [row["loss"] for row in needle(args, learner(kind)).tables["s-niah-1"]]

    short, long = losses("window")
    assert long == pytest.approx(short, abs=1e-5)
    for kind in ("attention", "memories"):
        short, long = losses(kind)
        assert abs(long - short) > 1e-4


def test_all_expected_strings_count_wherever_they_stand():
    assert TASKS["mq-niah"].score("they are ABC and 12", ["abc", "34"]) == 0.5


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


def test_what_cannot_be_asked(subject, stubbed, text, arguments, tmp_path):
    with pytest.raises(ValueError, match="--tasks s-nia-1 is none of s-niah-1, .*; did you mean s-niah-1?"):
        needle(text(tasks="s-nia-1"), stubbed(Stub))
    with pytest.raises(ValueError, match="--lengths is too short .* of mk-niah-1: give at least [0-9]+ tokens more"):
        needle(text(tasks="mk-niah-1", lengths="100,1k"), stubbed(Stub))
    with pytest.raises(ValueError, match="the model has 512 positions"):
        needle(text(lengths="1k"), subject("llama"))
    short = tmp_path / "short.txt"
    short.write_text("A short text. It ends.")
    with pytest.raises(ValueError, match=r"tokens around the needles, and the text .*short.txt. has \d+: lower it"):
        needle(arguments(validation_file=str(short), tasks="s-niah-2"), stubbed(Stub))
    assert list(
        needle(
            arguments(validation_file=str(short), tasks="s-niah-1", lengths="320", depths="1"), stubbed(Stub)
        ).tables
    )


def test_suites_share_the_flag_of_tasks(arguments):
    def seen(suites, tasks):
        return with_own_tasks(arguments(suite=suites, tasks=tasks), "needle").tasks

    classes = "clinc150-levels"
    assert seen("needle,class_incremental", f"{classes},s-niah-1") == "s-niah-1"
    assert seen("needle,class_incremental", "x") == "x"
    with pytest.raises(ValueError, match="--tasks names no needle task"):
        needle(arguments(tasks=seen("needle,zero_shot", "piqa")), None)


# Pass keys.


@pytest.mark.parametrize("length", [150, 256, 1000])
@pytest.mark.parametrize("depth", [0.0, 0.5, 1.0])
def test_a_pass_key_has_its_length_and_depth(subject, length, depth):
    loaded = subject()
    (sample,) = make_samples(loaded, TASKS["passkey"], filler(loaded, length), length, depth, range(3, 4))
    (key,) = sample.values
    text = loaded.tokenizer.decode(sample.prompt, skip_special_tokens=True)
    assert len(sample.prompt) + len(sample.answer) == length and sample.prompt[0] == loaded.start
    assert loaded.tokenizer.decode(sample.answer) == f" {key}" and len(key) == 5
    assert text.count(key) == 2 and text.endswith("The pass key is")
    before, _, after = text.partition("The pass key is")
    after = after[: after.index("What is")]
    assert (len(before) == 0) == (depth == 0.0)
    assert (NOISE[:20] in after) == (depth < 1.0)


def test_pass_keys_differ_by_seed_and_repeat(subject):
    loaded = subject()
    first, second, third, fourth = (
        make_samples(loaded, TASKS["passkey"], filler(loaded, 200), 200, 0.5, range(seed, seed + 1))[0].values
        for seed in (1, 2, 3, 1)
    )
    assert first == fourth and first != second != third != first


def test_pass_keys_of_a_model_that_copies_and_of_one_that_errs_once(subject, arguments, monkeypatch):
    loaded, module = subject(), "hope_hf.evaluation.needle.retrieval.carried_scores"

    def copies(model, input_ids, *rest):
        return Scores(torch.zeros(input_ids.shape[0], input_ids.shape[1] - 1), input_ids[:, 1:].clone())

    monkeypatch.setattr(module, copies)
    rows = passkey(arguments(lengths="200,256", depths="0,1", samples_per_length=3), loaded).tables["Passkey"]
    assert [(row["length"], row["depth"], row["n"]) for row in rows] == [
        (200, 0.0, 3), (200, 1.0, 3), (256, 0.0, 3), (256, 1.0, 3)
    ]  # fmt: skip
    assert all(row["exact"] == 1.0 and row["loss"] == 0.0 for row in rows)

    def errs_in_the_last_digit(model, input_ids, *rest):
        scores = copies(model, input_ids)
        scores.guesses[0, -1] += 1
        return scores

    monkeypatch.setattr(module, errs_in_the_last_digit)
    rows = passkey(arguments(lengths="200", depths="0", samples_per_length=4, batch_size=4), loaded).tables["Passkey"]
    assert rows[0]["exact"] < 1.0


def test_an_untrained_model_finds_no_pass_key(subject, arguments, tmp_path):
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
    # A tokenizer with longer tokens leaves fewer of the positions to the answer.
    assert len(loaded.encode(loaded.continued(torch.full((1, 157), loaded.start), 6)[0])) <= 3


def test_losses_that_are_no_numbers(subject, arguments):
    broken = subject("llama")
    with torch.no_grad():
        broken.model.lm_head.weight.fill_(float("nan"))
    with pytest.raises(ValueError, match="passkey: the model's losses are not finite"):
        passkey(arguments(lengths="160", depths="0.5", samples_per_length=1), broken)


def test_an_answer_must_begin_with_the_pass_key():
    score = TASKS["passkey"].score
    assert [score(text, ["12345"]) for text in (" 12345", "12399", "is 12345")] == [1.0, 0.0, 0.0]


def test_lengths_that_do_not_suit_pass_keys(subject, arguments):
    with pytest.raises(ValueError, match="--lengths is too short for the needles .* of passkey: give at least"):
        passkey(arguments(lengths="20"), subject())
    with pytest.raises(ValueError, match="the model has 512 positions"):
        passkey(arguments(lengths="1k"), subject("llama"))
