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
    train = []
    for classes in ((0, 1), (2, 3)):
        train.append([Example(f"it {labels[label]} {n}", label) for n in range(3) for label in classes])
    test = [examples[:4] for examples in train]
    return ClassGroups(["one", "two"], labels, [range(0, 2), range(2, 4)], train, test)


def weights_of(loaded) -> dict[str, torch.Tensor]:
    """A copy of a model's weights."""
    return {name: value.clone() for name, value in loaded.model.state_dict().items()}


def assert_same_weights(loaded, before: dict[str, torch.Tensor]) -> None:
    for name, value in loaded.model.state_dict().items():
        assert torch.equal(value, before[name]), name


@pytest.fixture
def data(tmp_path):
    """A folder with both data sets, small."""
    domains = {"home": ["light_on", "light_off"], "work": ["call_in"]}
    (tmp_path / "clinc150_domains.json").write_text(json.dumps(domains))
    examples = []
    for label in ("light_on", "light_off", "call_in"):
        examples += [[f"{label} 0", label], [f"{label} 1", label]]
    splits = {"train": examples, "test": examples[::2], "oos_test": [["x", "oos"]]}
    (tmp_path / "clinc150_full.json").write_text(json.dumps(splits))
    for split, count in (("train", 2), ("test", 1)):
        with (tmp_path / f"banking77_{split}.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["text", "category"])
            for label in range(14):
                for n in range(count):
                    writer.writerow([f"my, card {n}", f"Card_{label:02}"])
    return tmp_path


def test_data_sets_are_read_in_groups(data):
    clinc = clinc150(data)
    assert clinc.names == ["home", "work"]
    assert clinc.labels == ["light on", "light off", "call in"]
    assert clinc.classes == [range(0, 2), range(2, 3)]
    assert [len(part) for part in clinc.train] == [4, 2]
    assert clinc.test[1] == [Example("call_in 0", 2)]
    banking = banking77(data, 1)
    assert len(banking.names) == 7 and banking.names[1] == "3-4"
    assert sorted(banking.labels) == [f"Card {label:02}" for label in range(14)]
    assert banking.train[0][0].text == "my, card 0"
    # the seed draws which labels form a group
    assert banking.labels == banking77(data, 1).labels != banking77(data, 2).labels


@pytest.mark.skipif("HOPE_TEST_DATA" not in os.environ, reason="HOPE_TEST_DATA names no folder with the data sets")
def test_the_authors_files():
    folder = Path(os.environ["HOPE_TEST_DATA"]) / "cls"
    clinc = clinc150(folder)
    assert "kitchen_and_dining" in clinc.names and "exchange rate" in clinc.labels
    for parts, size in ((clinc.classes, 15), (clinc.train, 1500), (clinc.test, 450)):
        assert [len(part) for part in parts] == [size] * 10
    banking = banking77(folder, 42)
    assert [len(part) for part in banking.classes] == [11] * 7
    assert sum(map(len, banking.train)) == 10003


@torch.no_grad()
@pytest.mark.parametrize("kind", ["hope", "llama"])
def test_the_likeliest_label_is_that_of_whole_forward_passes(subject, groups, kind):
    loaded = subject(kind)
    prefix = [loaded.start, *context_of(loaded, groups.train[0][0]), *label_of(loaded, "reads")]
    contexts = [context_of(loaded, one) for one in (Example("it reads what was said", 0), *groups.test[1])]
    candidates = [label_of(loaded, label) for label in groups.labels]
    assert len({len(candidate) for candidate in candidates}) > 1

    def score(context: list[int], candidate: list[int]) -> float:
        ids = torch.tensor([[*prefix, *context, *candidate]])
        logits = loaded.model(ids, use_cache=False).logits[0, -len(candidate) - 1 : -1]
        return float(logits.log_softmax(-1).gather(1, torch.tensor(candidate)[:, None]).sum())

    expected = []
    for context in contexts:
        scores = [score(context, candidate) for candidate in candidates]
        expected.append(scores.index(max(scores)))
    cache = read(loaded, prefix)
    for rows_at_once in (1, 3, 64):
        assert choose(loaded, cache, contexts, candidates, rows_at_once) == expected


def test_levels_learn_from_the_examples_and_the_model_stays_as_it_was(learner, groups):
    loaded = learner(max_position_embeddings=4096)
    before = weights_of(loaded)
    example = groups.train[1][0]
    tokens = [*context_of(loaded, example), *label_of(loaded, groups.labels[example.label])] * 30
    learned = read(loaded, [loaded.start, *tokens], learn=True)
    plain = read(loaded, [loaded.start, *tokens])
    assert int(learned.levels.steps) == (1 + len(tokens)) // 32 > 2
    assert plain.levels is None
    contexts = [context_of(loaded, one) for part in groups.test for one in part]
    candidates = [label_of(loaded, label) for label in groups.labels]
    assert choose(loaded, learned, contexts, candidates, 64) == [2] * len(contexts)
    assert 2 not in choose(loaded, plain, contexts, candidates, 64)
    _, controls = learn_in_context(loaded, groups, 3, 64, 0, "x", learn=True)
    hits, others = learn_in_context(loaded, groups, 3, 64, 0, "x", learn=False)
    # the control reads the same examples in the context alone
    assert controls["frozen"] == hits[-1] and set(others) == {"joint"}
    assert_same_weights(loaded, before)


def test_fine_tuning_learns_a_group_forgets_it_and_leaves_the_model_as_it_was(subject, groups):
    loaded = subject("llama")
    before = weights_of(loaded)
    hits, controls = learn_by_fine_tuning(loaded, groups, 30, 8, 2e-2, 64, 0, "x")
    matrix = Matrix(groups.names, [2, 2], hits, controls)
    assert_same_weights(loaded, before)
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
    assert (row["average_accuracy"], row["joint"], row["chance"], row["n"]) == (0.5, 1.0, 0.125, 6)
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


def test_what_cannot_be_learned(subject, arguments, data):
    for kind, flags, words in (
        ("llama", dict(data_dir=None), "--data_dir"),
        ("mamba2", {}, "mamba2"),
        ("llama", dict(num_fewshot=3), "--num_fewshot 3"),
        ("gpt2", dict(num_fewshot=2), "160 positions .*--num_fewshot"),
        ("hope", dict(tasks="clinc150-levels"), "--tasks clinc150-levels .*level_learning"),
        ("llama", dict(tasks="clinc"), "--tasks clinc"),
    ):
        flags = dict(tasks="clinc150-in-context", data_dir=str(data)) | flags
        with pytest.raises(ValueError, match=words):
            class_incremental(arguments(**flags), subject(kind))


def test_files_that_cannot_be_used(data):
    domains = "clinc150_domains.json"
    for file, content, words in (
        (domains, "[]", "cannot be read"),
        (domains, '{"home": ["light_on", "light_off", "call_in"]}', "fewer than two groups"),
        (domains, '{"home": ["light_on"], "work": [1]}', "not a list of labels"),
        (domains, '{"home": ["light_on"], "work": ["light_on"]}', "stands twice"),
        ("clinc150_full.json", '{"train": [["x", "y"]], "test": []}', "'y'"),
        ("clinc150_full.json", '{"train": []}', "'test' is missing"),
        ("clinc150_full.json", '{"train": [["x"]], "test": []}', "a row is not"),
        ("banking77_train.csv", "sentence,category\nx,y\n", "'text' is missing"),
        ("banking77_train.csv", "text,category\nx\n", "a row is not"),
        ("banking77_test.csv", "text,category\nx,Card_01\n", "'Card_00'"),
    ):
        whole = (data / file).read_text()
        (data / file).write_text(content)
        with pytest.raises(ValueError, match=f"^--data_dir.*{words}"):
            open_groups(file.split("_")[0], data, 1)
        (data / file).write_text(whole)
