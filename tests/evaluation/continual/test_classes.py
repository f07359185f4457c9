"""Class-incremental learning: the data sets, the choice of a label, both ways of learning and their numbers."""

import csv
import json
import os
import re
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_outputs import CausalLMOutputWithPast

from hope_hf.evaluation import main
from hope_hf.evaluation.continual.class_incremental import (
    Matrix,
    average,
    backward_transfer,
    class_incremental,
    forgetting,
    rows,
    summary,
)
from hope_hf.evaluation.continual.classes import BANKING_GROUPS, ClassGroups, Example, banking77, clinc150, open_groups
from hope_hf.evaluation.continual.fine_tuning import learn_by_fine_tuning
from hope_hf.evaluation.continual.in_context import _tokens, choose, context_of, label_of, learn_in_context, read
from hope_hf.evaluation.subject import Subject
from hope_hf.model.cache_hope import CACHE_NAME


@pytest.fixture
def groups() -> ClassGroups:
    """Two groups of two classes: the label is said in the sentence."""
    labels = ["reads", "writes", "learns", "long text"]
    train = [[Example(f"it {labels[c]} {n}", c) for n in range(3) for c in classes] for classes in ((0, 1), (2, 3))]
    return ClassGroups(["one", "two"], labels, [range(0, 2), range(2, 4)], train, [part[:4] for part in train])


def matrix_of(groups, found) -> Matrix:
    return Matrix(groups.names, [len(one) for one in groups.classes], *found)


@pytest.fixture
def data(tmp_path):
    """A folder with both data sets, small."""
    domains = {"home": ["light_on", "light_off"], "work": ["call_in"]}
    rows = [[f"{label} {n}", label] for label in ("light_on", "light_off", "call_in") for n in range(2)]
    (tmp_path / "clinc150_domains.json").write_text(json.dumps(domains))
    splits = {"train": rows, "test": rows[::2], "oos_test": [["x", "oos"]]}
    (tmp_path / "clinc150_full.json").write_text(json.dumps(splits))
    for split, count in (("train", 2), ("test", 1)):
        with (tmp_path / f"banking77_{split}.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["text", "category"])
            writer.writerows([f"my, card {n}", f"Card_{label:02}"] for label in range(14) for n in range(count))
    return tmp_path


def test_data_sets_are_read_in_groups(data):
    clinc, banking = clinc150(data), banking77(data, 1)
    assert (clinc.names, clinc.labels) == (["home", "work"], ["light on", "light off", "call in"])
    assert [len(part) for part in clinc.train] == [4, 2] and clinc.classes == [range(0, 2), range(2, 3)]
    assert clinc.test[1] == [Example("call_in 0", 2)]
    assert len(banking.names) == BANKING_GROUPS and banking.names[1] == "3-4"
    assert sorted(banking.labels) == [f"Card {label:02}" for label in range(14)]
    assert banking.labels == banking77(data, 1).labels != banking77(data, 2).labels
    assert banking.train[0][0].text == "my, card 0"


def test_examples_are_drawn_by_seed_and_class(groups):
    first, again, other = (groups.shuffled(seed, 1, None) for seed in (1, 1, 2))
    assert first.train == again.train != other.train and sorted(map(len, first.train)) == [6, 6]
    assert [sorted(example.label for example in part) for part in first.test] == [[0, 1], [2, 3]]
    assert [len(part) for part in groups.shuffled(1, 2, 3).test] == [3, 3]
    assert [len(part) for part in groups.shuffled(1, 9, None).test] == [4, 4]


@pytest.mark.skipif("HOPE_TEST_DATA" not in os.environ, reason="HOPE_TEST_DATA names no folder with the data sets")
def test_the_authors_files():
    folder = Path(os.environ["HOPE_TEST_DATA"]) / "cls"
    clinc, banking = clinc150(folder), banking77(folder, 42)
    assert "kitchen_and_dining" in clinc.names and "exchange rate" in clinc.labels
    assert [list(map(len, part)) for part in (clinc.classes, clinc.train, clinc.test)] == [
        [15] * 10, [1500] * 10, [450] * 10,
    ]  # fmt: skip
    assert [len(part) for part in banking.classes] == [11] * 7 and sum(map(len, banking.train)) == 10003
    assert [len(part) for part in banking.shuffled(42, 2, None).test] == [22] * 7


@pytest.mark.parametrize("kind", ["hope", "llama"])
def test_the_likeliest_label_is_that_of_whole_forward_passes(subject, groups, kind):
    loaded = subject(kind)
    example = Example("it reads what was said", 0)
    prefix = [loaded.start, *context_of(loaded, groups.train[0][0]), *label_of(loaded, "reads")]
    contexts = [context_of(loaded, one) for one in (example, *groups.test[1])]
    candidates = [label_of(loaded, label) for label in groups.labels]
    cache = read(loaded, prefix)
    chosen = [choose(loaded, cache, contexts, candidates, rows) for rows in (1, 3, 64)]
    expected = []
    for context in contexts:
        scores = []
        for candidate in candidates:
            ids = torch.tensor([[*prefix, *context, *candidate]])
            with torch.no_grad():
                found = loaded.model(ids, use_cache=False).logits.log_softmax(-1)[0, -len(candidate) - 1 : -1]
            scores.append(float(found.gather(1, torch.tensor(candidate)[:, None]).sum()))
        expected.append(scores.index(max(scores)))
    assert chosen[0] == chosen[1] == chosen[2] == expected
    assert len({len(candidate) for candidate in candidates}) > 1


def test_the_matrix_grows_with_the_groups_and_has_its_controls(subject, groups):
    loaded = subject("hope")
    matrix = matrix_of(groups, learn_in_context(loaded, groups, 1, 64, 0, "x"))
    assert [len(row) for row in matrix.hits] == [1, 2] and set(matrix.controls) == {"joint", "frozen"}
    assert set(learn_in_context(subject("llama"), groups, 1, 64, 0, "x")[1]) == {"joint"}
    assert [row["chance"] for row in rows(matrix)] == [0.5, 0.25, 0.25, 0.25]


def test_levels_learn_from_the_examples_and_the_model_stays_as_it_was(learner, groups):
    loaded = learner(max_position_embeddings=4096)
    before = {name: value.clone() for name, value in loaded.model.state_dict().items()}
    tokens = [loaded.start, *_tokens(loaded, groups, groups.train[1][:1] * 30)]
    cache, plain = read(loaded, tokens, learn=True), read(loaded, tokens)
    assert int(cache.levels.steps) == len(tokens) // 32 > 2 and plain.levels is None
    contexts = [context_of(loaded, one) for part in groups.test for one in part]
    candidates = [label_of(loaded, label) for label in groups.labels]
    assert choose(loaded, cache, contexts, candidates, 64) == [2] * len(contexts)
    assert choose(loaded, cache, contexts, candidates, 1) == [2] * len(contexts)
    assert 2 not in choose(loaded, plain, contexts, candidates, 64)
    found, alone = (learn_in_context(loaded, groups, 3, 64, 0, "x", learn=learn) for learn in (True, False))
    # the control reads the same examples in the context alone
    assert found[1]["frozen"] == alone[0][-1] and set(alone[1]) == {"joint"}
    assert all(torch.equal(value, before[name]) for name, value in loaded.model.state_dict().items())


def test_fine_tuning_learns_a_group_forgets_it_and_leaves_the_model_as_it_was(subject, groups):
    loaded = subject("llama")
    before = {name: value.clone() for name, value in loaded.model.state_dict().items()}
    matrix = matrix_of(groups, learn_by_fine_tuning(loaded, groups, 30, 8, 2e-2, 64, 0, "x"))
    assert all(torch.equal(value, before[name]) for name, value in loaded.model.state_dict().items())
    assert matrix.accuracy(0, 0) > 0.5 and matrix.accuracy(1, 1) > 0.5
    assert forgetting(matrix) == matrix.accuracy(0, 0) - matrix.accuracy(1, 0) > 0
    assert average(matrix.controls["joint"])[0] > 0.25


class History:
    """A cache of all tokens read, [B, T]."""

    def __init__(self, ids: torch.Tensor):
        self.ids = ids

    def batch_repeat_interleave(self, times: int):
        self.ids = self.ids.repeat_interleave(times, 0)


class Uniform(torch.nn.Module):
    """Says every token alike."""

    device = torch.device("cpu")

    def __init__(self, tokenizer):
        super().__init__()
        self.config = LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=10_000)

    def forward(self, input_ids, use_cache=True, logits_to_keep=0, **given):
        cache = given[CACHE_NAME]
        ids = input_ids if cache is None else torch.cat([cache.ids, input_ids], 1)
        logits = torch.zeros(*input_ids.shape, self.config.vocab_size)
        for row, tokens in zip(logits, ids.tolist(), strict=True):
            for place in range(len(row)):
                self.answer(row[place], tokens[: ids.shape[1] - len(row) + place + 1])
        return CausalLMOutputWithPast(logits=logits[:, -logits_to_keep:], **{CACHE_NAME: History(ids)})

    def answer(self, logits, ids):
        """What comes after `ids`."""


class Copier(Uniform):
    """Says what followed the same question earlier, if that was among the last `examples` ones."""

    examples = 1000

    def __init__(self, tokenizer):
        super().__init__(tokenizer)
        self._mark = tokenizer("Query:", add_special_tokens=False)["input_ids"]

    def answer(self, logits, ids):
        *earlier, last = [at for at in range(len(ids)) if ids[at : at + len(self._mark)] == self._mark] or [0]
        asked = ids[last:]
        for at in earlier[-self.examples :]:
            if ids[at : at + len(asked)] == asked:
                logits[ids[at + len(asked)]] = 50.0


class Forgetful(Copier):
    """Knows the last group only."""

    examples = 2


@pytest.fixture
def learned(subject):
    """The matrix of a made-up model on three groups of two classes, asked what it was shown."""
    tokenizer = subject("llama").tokenizer
    labels = ["was said long before", "of a model that learns", "learns the text", "writes text", "the", "text"]
    classes = [range(0, 2), range(2, 4), range(4, 6)]
    examples = [[Example(f"what is number {label}?", label) for label in part] for part in classes]
    groups = ClassGroups(["a", "b", "c"], labels, classes, examples, examples)
    return lambda kind: matrix_of(groups, learn_in_context(Subject(kind(tokenizer), tokenizer), groups, 1, 64, 0, "x"))


def test_a_model_that_keeps_everything_scores_all_and_forgets_nothing(learned):
    matrix = learned(Copier)
    assert [[matrix.accuracy(i, j) for j in range(i + 1)] for i in range(3)] == [[1], [1, 1], [1, 1, 1]]
    row = summary("x", matrix)
    assert (row["average_accuracy"], row["joint"]) == (1.0, 1.0)
    assert row["forgetting"] == row["backward_transfer"] == 0.0


def test_a_model_that_keeps_the_last_group_only_forgets_the_others(learned):
    matrix = learned(Forgetful)
    # Where it knows nothing it takes the shortest label, which is of the last group met.
    assert [[matrix.accuracy(i, j) for j in range(i + 1)] for i in range(3)] == [[1], [0, 1], [0, 0, 1]]
    row = summary("x", matrix)
    assert (row["forgetting"], row["backward_transfer"], row["average_accuracy"]) == (1.0, -1.0, 1 / 3)


def test_a_uniform_model_scores_the_chance_that_is_printed(learned):
    table = rows(learned(Uniform))
    assert [row["chance"] for row in table] == [1 / 2, 1 / 4, 1 / 6, 1 / 6]
    for row in table:
        assert row["average"] == pytest.approx(row["chance"], rel=1e-12)


def test_numbers_of_a_matrix():
    hits = [[[1.0, 1.0]], [[1.0, 0.0], [1.0, 1.0]], [[0.0, 0.0], [1.0, 1.0], [1.0, 0.0]]]
    matrix = Matrix(["a", "b", "c"], [2, 2, 4], hits, {"joint": [[1.0, 1.0]] * 3})
    assert forgetting(matrix) == 0.5 and backward_transfer(matrix) == -0.5
    assert average(hits[-1])[0] == 0.5
    row = summary("x", matrix)
    assert (row["average_accuracy"], row["joint"], row["frozen"]) == (0.5, 1.0, None)
    assert (row["chance"], row["n"]) == (0.125, 6)
    table = rows(matrix)
    assert table[0] | {"average_stderr": 0} == {
        "after": "a", "n": 2, "chance": 0.5, "a": 1.0, "b": None, "c": None, "average": 1.0, "average_stderr": 0,
    }  # fmt: skip
    assert [row["after"] for row in table] == ["a", "b", "c", "joint"]


def test_a_whole_report(folders, data, tmp_path):
    flags = ["--suite", "class_incremental", "--model_name_or_path", folders["llama"], "--data_dir", str(data)]
    flags += ["--tasks", "clinc150-in-context,clinc150-fine-tuning", "--max_train_steps", "2", "--limit", "1"]
    assert main([*flags, "--device", "cpu", "--cpu_threads", "1", "--output_dir", str(tmp_path / "eval")]) == 0
    tables = json.loads((tmp_path / "eval" / "results.json").read_text())["results"]["class_incremental"]["tables"]
    assert list(tables) == ["Class-incremental learning", "clinc150-in-context", "clinc150-fine-tuning"]
    for name in ("in-context", "fine-tuning"):
        picture = tmp_path / "eval" / f"class_incremental_clinc150-{name}.png"
        assert picture.read_bytes().startswith(b"\x89PNG")


def test_what_cannot_be_learned(subject, arguments, data, groups):
    def ask(kind="llama", **options):
        class_incremental(arguments(tasks="clinc150-in-context", **options), subject(kind))

    with pytest.raises(ValueError, match="needs --data_dir: a folder with clinc150_full.json"):
        ask()
    with pytest.raises(ValueError, match="which mamba2 cannot: leave it out"):
        ask("mamba2", data_dir=str(data))
    with pytest.raises(ValueError, match="--num_fewshot 3 is more than the 2 examples that a class has"):
        ask(data_dir=str(data), num_fewshot=3)
    with pytest.raises(ValueError, match="take .* tokens, and the model has 160 positions .*: lower --num_fewshot"):
        ask("gpt2", data_dir=str(data), num_fewshot=2)
    with pytest.raises(ValueError, match="--tasks clinc150-levels needs a model whose config.json has level_learning"):
        class_incremental(arguments(tasks="clinc150-levels", data_dir=str(data)), subject("hope"))
    with pytest.raises(ValueError, match="--tasks clinc is none of clinc150-in-context, "):
        class_incremental(arguments(tasks="clinc", data_dir=str(data)), subject("llama"))
    (data / "clinc150_domains.json").unlink()
    with pytest.raises(ValueError, match="has no clinc150_domains.json: copy the data set's file there"):
        ask(data_dir=str(data))
    (data / "clinc150_domains.json").write_text("[]")
    with pytest.raises(ValueError, match="clinc150_domains.json cannot be read, copy it again"):
        ask(data_dir=str(data))
    with pytest.raises(ValueError, match="the loss of fine-tuning is not finite: lower --learning_rate"):
        learn_by_fine_tuning(subject("llama"), groups, 9, 4, 1e9, 64, 0, "x")


@pytest.mark.parametrize(
    ("file", "content", "sentence"),
    [
        ("clinc150_domains.json", {"home": ["light_on", "light_off", "call_in"]}, "fewer than two groups of classes"),
        ("clinc150_full.json", {"train": [["x", "y"]], "test": []}, "split train, has a label without a group, 'y':"),
        ("clinc150_domains.json", {"home": ["light_on"], "work": []}, "a group is not a list of labels"),
        ("clinc150_domains.json", {"home": ["light_on"], "work": [1]}, "a group is not a list of labels"),
        ("clinc150_domains.json", {"home": ["light_on"], "work": ["light_on"]}, "a label stands twice"),
        ("clinc150_full.json", {"train": []}, "cannot be read, copy it again: 'test' is missing"),
        ("clinc150_full.json", {"train": [["x"]], "test": []}, "a row is not a sentence and its label"),
        ("clinc150_full.json", {"train": [[1, "call_in"]], "test": []}, "a row is not a sentence and its label"),
        ("clinc150_full.json", {"train": [], "test": []}, "split train, has no example of the label 'call_in': add"),
        ("banking77_train.csv", "sentence,category\nx,y\n", "cannot be read, copy it again: 'text' is missing"),
        ("banking77_train.csv", "text,category\nx\n", "a row is not a sentence and its label"),
        ("banking77_train.csv", "text,category\n", "fewer than two groups of classes: forgetting needs two or more"),
        ("banking77_train.csv", "text,category\nx,y\n", "fewer than two groups of classes"),
        ("banking77_test.csv", "text,category\nx,Card_01\n", " has no example of the label 'Card_00'"),
        ("banking77_test.csv", "text,category\nx,y\n", " has a label without a group, 'y': add it to one"),
    ],
)
def test_files_that_cannot_be_used(data, file, content, sentence):
    (data / file).write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(ValueError, match=f"^--data_dir: .*{file}.*{re.escape(sentence)}"):
        open_groups(file.split("_")[0], data, 1)
