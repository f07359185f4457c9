"""Reports side by side."""

import json
import os

import pytest

from hope_hf.evaluation import main
from hope_hf.evaluation.compare import compare
from hope_hf.evaluation.flags import Arguments


@pytest.fixture
def write(tmp_path):
    """Write a folder with a report of one number; returns its path."""

    def report(name: str, loss: float = 1.0, stderr: float | None = None, text: str = "x", **config) -> str:
        rows = [{"documents": 2, "n": 10, "loss": loss, "loss_stderr": stderr}]
        record = {
            "schema_version": 1,
            "config": {"suite": "perplexity", "limit": None, "output_dir": name} | config,
            "results": {"perplexity": {"tables": {f"Text: {text}": rows}, "samples": {}}},
        }
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "results.json").write_text(json.dumps(record))
        return str(tmp_path / name)

    return report


def test_differences_have_their_standard_errors(write):
    runs = [write("a", 2.0, 0.3), write("b", 1.5, 0.4, text="y"), write("c", 1.0, None, limit=3)]
    with (
        pytest.warns(UserWarning, match=r"a and c .* other flags: --limit \(None and 3\)"),
        pytest.warns(UserWarning, match="a and b read different texts, x and y"),
    ):
        tables = compare(Arguments(compare=runs)).tables
    ((row,),) = tables.values()
    assert list(tables) == ["perplexity: Text: x"]
    assert (row["number"], row["a"], row["b_stderr"]) == ("loss", 2.0, 0.4)
    assert (row["b - a"], row["b - a_stderr"]) == (-0.5, pytest.approx(0.5))
    assert (row["c - a"], row["c - a_stderr"]) == (-1.0, None)


def test_a_table_and_a_figure_are_written_once(write, tmp_path, capsys):
    """The folders are named like a column, and with signs of a formula."""
    flags = ["--compare", write("number", 2.0, 0.3), write("_$x$", 1.5, 0.4), "--output_dir", str(tmp_path / "cmp")]
    assert main(flags) == main(flags) == 0
    assert "-0.5000 ± 0.5000" in capsys.readouterr().out
    files = ["compare.json", "compare.md", "compare.png"]
    (again,) = (tmp_path / "cmp").glob("*Z")
    assert sorted(path.name for path in (tmp_path / "cmp").iterdir() if path != again) == files
    assert sorted(path.name for path in again.iterdir()) == files
    assert "number (1)" in (tmp_path / "cmp" / "compare.md").read_text()


def test_the_newest_of_an_archive_and_files_by_name(write, tmp_path):
    (tmp_path / "kept").mkdir()
    names = {"20250101T000000Z": 2.0, "20250102T000000Z-2": 1.5, "20250102T000000Z-10": 1.0}
    for name, loss in names.items():
        os.rename(f"{write(name, loss)}/results.json", tmp_path / "kept" / f"{name}.json")
    (rows,) = compare(
        Arguments(compare=[str(tmp_path / "kept/20250101T000000Z.json"), str(tmp_path / "kept")])
    ).tables.values()
    assert rows[0]["kept - 20250101T000000Z.json"] == -1.0


# What is changed in a report that is no longer one.
FORGED = [
    lambda record: record.update(schema_version=9),
    lambda record: record.pop("config"),
    lambda record: record.update(results=[]),
    lambda record: record.update(unfinished=[1]),
    lambda record: record.update(pictures={"perplexity": ["../a.png"]}),
    lambda record: record.update(model={"step": "x"}),
    lambda record: record["results"].update({"../x": {"tables": {}}}),
    lambda record: record["results"]["perplexity"].update(tables={"a": [1]}),
]


@pytest.mark.parametrize("forge", FORGED)
def test_a_forged_report_is_one_sentence(write, forge, capsys):
    folder = write("b")
    with open(f"{folder}/results.json") as file:
        record = json.load(file)
    forge(record)
    with open(f"{folder}/results.json", "w") as file:
        json.dump(record, file)
    assert main(["--compare", write("a"), folder]) == 2
    error = capsys.readouterr().err
    assert f"--compare {folder}/results.json" in error and error.count("\n") == 1


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"[" * 100_000, b'{"a": NaN}', b"\x80", None, "pipe"])
def test_what_is_no_report_is_one_sentence(write, tmp_path, content, capsys):
    path = tmp_path / "d" / "results.json"
    path.parent.mkdir()
    if content == "pipe":
        path = tmp_path / "pipe"
        os.mkfifo(path)
    elif content is not None:
        path.write_bytes(content)
    assert main(["--compare", write("a"), str(path if content else path.parent)]) == 2
    error = capsys.readouterr().err
    assert "--compare" in error and error.count("\n") == 1
