"""Class-incremental learning: the data sets, the choice of a label, both ways of learning and their numbers."""

import csv
import json
import os
from pathlib import Path

import pytest
import torch

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
from hope_hf.evaluation.continual.classes import ClassGroups, Example, banking77, clinc150, open_groups
from hope_hf.evaluation.continual.fine_tuning import learn_by_fine_tuning
from hope_hf.evaluation.continual.in_context import choose, context_of, label_of, learn_in_context, read


@pytest.fixture
def groups() -> ClassGroups:
    """Two groups of two classes: the label is said in the sentence."""
    labels = ["reads", "writes", "learns", "long text"]
    classes = [range(0, 2), range(2, 4)]
    train = [[Example(f"it {labels[c]} {n}", c) for n in range(3) for c in part] for part in classes]
    return ClassGroups(["one", "two"], labels, classes, train, [part[:4] for part in train])


def matrix_of(groups, found) -> Matrix:
    hits, controls = found
    return Matrix(groups.names, [len(one) for one in groups.classes], hits, controls)


@pytest.fixture
def data(tmp_path):
    """A folder with both data sets, small."""
    domains = {"home": ["light_on", "light_off"], "work": ["call_in"]}
    examples = [[f"{label} {n}", label] for label in ("light_on", "light_off", "call_in") for n in range(2)]
    (tmp_path / "clinc150_domains.json").write_text(json.dumps(domains))
    splits = {"train": examples, "test": examples[::2], "oos_test": [["x", "oos"]]}
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
    assert len(banking.names) == 7 and banking.names[1] == "3-4"
    assert sorted(banking.labels) == [f"Card {label:02}" for label in range(14)]
    assert banking.labels == banking77(data, 1).labels != banking77(data, 2).labels
    assert banking.train[0][0].text == "my, card 0"


def test_examples_are_drawn_by_seed_and_class(groups):
    first, again, other = (groups.shuffled(seed, 1, None) for seed in (1, 1, 2))
    assert first.train == again.train != other.train and sorted(map(len, first.train)) == [6, 6]
    assert [sorted(example.label for example in part) for part in first.test] == [[0, 1], [2, 3]]
    assert [len(part) for part in groups.shuffled(1, 2, 3).test] == [3, 3]


@pytest.mark.skipif("HOPE_TEST_DATA" not in os.environ, reason="HOPE_TEST_DATA names no folder with the data sets")
def test_the_authors_files():
    folder = Path(os.environ["HOPE_TEST_DATA"]) / "cls"
    clinc, banking = clinc150(folder), banking77(folder, 42)
    assert "kitchen_and_dining" in clinc.names and "exchange rate" in clinc.labels
    sizes = [list(map(len, part)) for part in (clinc.classes, clinc.train, clinc.test)]
    assert sizes == [[15] * 10, [1500] * 10, [450] * 10]
    assert [len(part) for part in banking.classes] == [11] * 7 and sum(map(len, banking.train)) == 10003


@torch.no_grad()
@pytest.mark.parametrize("kind", ["hope", "llama"])
def test_the_likeliest_label_is_that_of_whole_forward_passes(subject, groups, kind):
    loaded = subject(kind)
    prefix = [loaded.start, *context_of(loaded, groups.train[0][0]), *label_of(loaded, "reads")]
    contexts = [context_of(loaded, one) for one in (Example("it reads what was said", 0), *groups.test[1])]
    candidates = [label_of(loaded, label) for label in groups.labels]
    assert len({len(candidate) for candidate in candidates}) > 1
    expected = []
    for context in contexts:
        scores = []
        for candidate in candidates:
            ids = torch.tensor([[*prefix, *context, *candidate]])
            found = loaded.model(ids, use_cache=False).logits.log_softmax(-1)[0, -len(candidate) - 1 : -1]
            scores.append(float(found.gather(1, torch.tensor(candidate)[:, None]).sum()))
        expected.append(scores.index(max(scores)))
    cache = read(loaded, prefix)
    for rows_at_once in (1, 3, 64):
        assert choose(loaded, cache, contexts, candidates, rows_at_once) == expected


def test_the_matrix_grows_with_the_groups_and_has_its_controls(subject, groups):
    matrix = matrix_of(groups, learn_in_context(subject("hope"), groups, 1, 64, 0, "x"))
    assert [len(row) for row in matrix.hits] == [1, 2] and set(matrix.controls) == {"joint", "frozen"}
    assert [row["chance"] for row in rows(matrix)] == [0.5, 0.25, 0.25, 0.25]


def test_levels_learn_from_the_examples_and_the_model_stays_as_it_was(learner, groups):
    loaded = learner(max_position_embeddings=4096)
    before = {name: value.clone() for name, value in loaded.model.state_dict().items()}
    example = groups.train[1][0]
    tokens = [*context_of(loaded, example), *label_of(loaded, groups.labels[example.label])] * 30
    cache, plain = read(loaded, [loaded.start, *tokens], learn=True), read(loaded, [loaded.start, *tokens])
    assert int(cache.levels.steps) == (1 + len(tokens)) // 32 > 2 and plain.levels is None
    contexts = [context_of(loaded, one) for part in groups.test for one in part]
    candidates = [label_of(loaded, label) for label in groups.labels]
    for rows_at_once in (64, 1):
        assert choose(loaded, cache, contexts, candidates, rows_at_once) == [2] * len(contexts)
    assert 2 not in choose(loaded, plain, contexts, candidates, 64)
    (_, controls), (hits, others) = (
        learn_in_context(loaded, groups, 3, 64, 0, "x", learn=learn) for learn in (True, False)
    )
    # the control reads the same examples in the context alone
    assert controls["frozen"] == hits[-1] and set(others) == {"joint"}
    assert all(torch.equal(value, before[name]) for name, value in loaded.model.state_dict().items())


def test_fine_tuning_learns_a_group_forgets_it_and_leaves_the_model_as_it_was(subject, groups):
    loaded = subject("llama")
    before = {name: value.clone() for name, value in loaded.model.state_dict().items()}
    matrix = matrix_of(groups, learn_by_fine_tuning(loaded, groups, 30, 8, 2e-2, 64, 0, "x"))
    assert all(torch.equal(value, before[name]) for name, value in loaded.model.state_dict().items())
    assert matrix.accuracy(0, 0) > 0.5 and matrix.accuracy(1, 1) > 0.5
    assert forgetting(matrix) == matrix.accuracy(0, 0) - matrix.accuracy(1, 0) > 0
    assert average(matrix.controls["joint"])[0] > 0.25
    with pytest.raises(ValueError, match="--learning_rate"):
        learn_by_fine_tuning(loaded, groups, 9, 4, 1e9, 64, 0, "x")


def test_numbers_of_a_matrix():
    hits = [[[1.0, 1.0]], [[1.0, 0.0], [1.0, 1.0]], [[0.0, 0.0], [1.0, 1.0], [1.0, 0.0]]]
    matrix = Matrix(["a", "b", "c"], [2, 2, 4], hits, {"joint": [[1.0, 1.0]] * 3})
    assert forgetting(matrix) == 0.5 and backward_transfer(matrix) == -0.5
    row = summary("x", matrix)
    assert (row["average_accuracy"], row["joint"], row["frozen"]) == (0.5, 1.0, None)
    assert (row["chance"], row["n"]) == (0.125, 6)
    table = rows(matrix)
    assert list(table[0].values())[:-1] == ["a", 2, 0.5, 1.0, None, None, 1.0]
    assert [row["after"] for row in table] == ["a", "b", "c", "joint"]
    assert [row["chance"] for row in table] == [1 / 2, 1 / 4, 1 / 8, 1 / 8]


def test_a_whole_report(folders, data, tmp_path):
    flags = ["--suite", "class_incremental", "--model_name_or_path", folders["llama"], "--data_dir", str(data)]
    flags += ["--tasks", "clinc150-in-context,clinc150-fine-tuning", "--max_train_steps", "2", "--limit", "1"]
    assert main([*flags, "--device", "cpu", "--cpu_threads", "1", "--output_dir", str(tmp_path / "eval")]) == 0
    tables = json.loads((tmp_path / "eval" / "results.json").read_text())["results"]["class_incremental"]["tables"]
    assert list(tables) == ["Class-incremental learning", "clinc150-in-context", "clinc150-fine-tuning"]
    for name in ("in-context", "fine-tuning"):
        picture = tmp_path / "eval" / f"class_incremental_clinc150-{name}.png"
        assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("kind", "flags", "words"),
    [
        ("llama", dict(data_dir=None), "--data_dir"),
        ("mamba2", {}, "mamba2"),
        ("llama", dict(num_fewshot=3), "--num_fewshot 3"),
        ("gpt2", dict(num_fewshot=2), "160 positions .*--num_fewshot"),
        ("hope", dict(tasks="clinc150-levels"), "--tasks clinc150-levels .*level_learning"),
        ("llama", dict(tasks="clinc"), "--tasks clinc is none of"),
    ],
)
def test_what_cannot_be_learned(subject, arguments, data, kind, flags, words):
    flags = dict(tasks="clinc150-in-context", data_dir=str(data)) | flags
    with pytest.raises(ValueError, match=words):
        class_incremental(arguments(**flags), subject(kind))


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("clinc150_domains.json", None, "clinc150_domains.json"),
        ("clinc150_domains.json", [], "cannot be read"),
        ("clinc150_domains.json", {"home": ["light_on", "light_off", "call_in"]}, "fewer than two groups"),
        ("clinc150_domains.json", {"home": ["light_on"], "work": []}, "not a list of labels"),
        ("clinc150_domains.json", {"home": ["light_on"], "work": [1]}, "not a list of labels"),
        ("clinc150_domains.json", {"home": ["light_on"], "work": ["light_on"]}, "stands twice"),
        ("clinc150_full.json", {"train": [["x", "y"]], "test": []}, "split train, .*'y'"),
        ("clinc150_full.json", {"train": []}, "'test' is missing"),
        ("clinc150_full.json", {"train": [["x"]], "test": []}, "a row is not"),
        ("clinc150_full.json", {"train": [], "test": []}, "split train, .*'call_in'"),
        ("banking77_train.csv", "sentence,category\nx,y\n", "'text' is missing"),
        ("banking77_train.csv", "text,category\nx\n", "a row is not"),
        ("banking77_train.csv", "text,category\n", "fewer than two groups"),
        ("banking77_test.csv", "text,category\nx,Card_01\n", "'Card_00'"),
    ],
)
def test_files_that_cannot_be_used(data, file, content, words):
    if content is None:
        (data / file).unlink()
    else:
        (data / file).write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(ValueError, match=f"^--data_dir.*{file}.*{words}|^--data_dir.*{words}"):
        open_groups(file.split("_")[0], data, 1)
