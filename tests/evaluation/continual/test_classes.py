"""Class-incremental learning: the data sets, the choice of a label, both ways of learning and their numbers."""

import csv
import json

import pytest
import torch

from hope_hf.evaluation import main
from hope_hf.evaluation.continual import class_suite
from hope_hf.evaluation.continual.classes import BANKING_GROUPS, ClassGroups, Example, banking77, clinc150
from hope_hf.evaluation.continual.fine_tuning import learn_by_fine_tuning
from hope_hf.evaluation.continual.in_context import learn_in_context
from hope_hf.evaluation.continual.labels import choose, context_of, label_of, read
from hope_hf.evaluation.continual.matrix import Matrix, average, backward_transfer, forgetting, rows, summary


@pytest.fixture(autouse=True)
def _process_settings():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def groups() -> ClassGroups:
    """Two groups of two classes: the label is said in the sentence."""
    labels = ["reads", "writes", "learns", "long text"]
    train = [[Example(f"it {labels[c]} {n}", c) for n in range(3) for c in classes] for classes in ((0, 1), (2, 3))]
    return ClassGroups(["one", "two"], labels, [range(0, 2), range(2, 4)], train, [part[:4] for part in train])


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
    clinc, banking = clinc150(data), banking77(data)
    assert (clinc.names, clinc.labels) == (["home", "work"], ["light on", "light off", "call in"])
    assert [len(part) for part in clinc.train] == [4, 2] and clinc.classes == [range(0, 2), range(2, 3)]
    assert clinc.test[1] == [Example("call_in 0", 2)]
    assert len(banking.names) == BANKING_GROUPS and banking.names[1] == "3-4" and banking.labels[2] == "Card 02"
    assert banking.train[0][0].text == "my, card 0"
    assert [len(part) for part in clinc.shuffled(1, 1).test] == [1, 1]
    assert clinc.shuffled(1, None).train == clinc.shuffled(1, None).train != clinc.shuffled(2, None).train


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
    matrix = learn_in_context(loaded, groups, 1, 64, 0, "x")
    assert [len(row) for row in matrix.hits] == [1, 2] and set(matrix.controls) == {"joint", "frozen"}
    assert set(learn_in_context(subject("llama"), groups, 1, 64, 0, "x").controls) == {"joint"}
    assert [row["chance"] for row in rows(matrix)] == [0.5, 0.25, 0.25, 0.25]


def test_fine_tuning_learns_a_group_forgets_it_and_leaves_the_model_as_it_was(subject, groups):
    loaded = subject("llama")
    before = {name: value.clone() for name, value in loaded.model.state_dict().items()}
    matrix = learn_by_fine_tuning(loaded, groups, 30, 8, 2e-2, 64, 0, "x")
    assert all(torch.equal(value, before[name]) for name, value in loaded.model.state_dict().items())
    assert matrix.accuracy(0, 0) > 0.5 and matrix.accuracy(1, 1) > 0.5
    assert forgetting(matrix) == matrix.accuracy(0, 0) - matrix.accuracy(1, 0) > 0
    assert average(matrix.controls["joint"])[0] > 0.25


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
        class_suite.class_incremental(arguments(tasks="clinc150-in-context", **options), subject(kind))

    with pytest.raises(ValueError, match="needs --data_dir: a folder with clinc150_full.json"):
        ask()
    with pytest.raises(ValueError, match="which mamba2 cannot: leave it out"):
        ask("mamba2", data_dir=str(data))
    with pytest.raises(ValueError, match="--num_fewshot 3 is more than the 2 examples that a class has"):
        ask(data_dir=str(data), num_fewshot=3)
    with pytest.raises(ValueError, match="take .* tokens, and the model has 160 positions .*: lower --num_fewshot"):
        ask("gpt2", data_dir=str(data), num_fewshot=2)
    with pytest.raises(ValueError, match="--tasks clinc is none of clinc150-in-context, "):
        class_suite.class_incremental(arguments(tasks="clinc", data_dir=str(data)), subject("llama"))
    (data / "clinc150_domains.json").unlink()
    with pytest.raises(ValueError, match="has no clinc150_domains.json: copy the data set's file there"):
        ask(data_dir=str(data))
    (data / "clinc150_domains.json").write_text("[]")
    with pytest.raises(ValueError, match="clinc150_domains.json cannot be read, copy it again"):
        ask(data_dir=str(data))
    (data / "clinc150_domains.json").write_text('{"home": ["light_on"]}')
    with pytest.raises(ValueError, match="clinc150_full.json has a row with an unknown label: 'light_off'"):
        ask(data_dir=str(data))
    (data / "banking77_train.csv").write_text("sentence,category\nx,y\n")
    with pytest.raises(ValueError, match="banking77_train.csv cannot be read, copy it again: 'text' is missing"):
        banking77(data)
    with pytest.raises(ValueError, match="the loss of fine-tuning is not finite: lower --learning_rate"):
        learn_by_fine_tuning(subject("llama"), groups, 9, 4, 1e9, 64, 0, "x")
