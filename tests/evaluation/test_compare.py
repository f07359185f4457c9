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
        row = {"documents": 2, "n": 10, "loss": loss, "loss_stderr": stderr}
        suite = {"tables": {f"Text: {text}": [row]}, "samples": {}}
        config = {"suite": "perplexity", "limit": None, "output_dir": name} | config
        record = {"schema_version": 1, "config": config, "results": {"perplexity": suite}}
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "results.json").write_text(json.dumps(record))
        return str(tmp_path / name)

    return report


def test_differences_have_their_standard_errors(write):
    runs = [write("a", 2.0, 0.3), write("b", 1.5, 0.4, text="y"), write("c", 1.0, None, limit=3)]
    with (
        pytest.warns(UserWarning, match="a and c .*--limit"),
        pytest.warns(UserWarning, match="a and b read different texts"),
    ):
        tables = compare(Arguments(compare=runs)).tables
    ((row,),) = tables.values()
    assert (row["number"], row["a"], row["b_stderr"]) == ("loss", 2.0, 0.4)
    assert (row["b - a"], row["b - a_stderr"]) == (-0.5, pytest.approx(0.5))
    assert (row["c - a"], row["c - a_stderr"]) == (-1.0, None)


def test_a_table_and_a_figure_are_written_once(write, tmp_path, capsys):
    """The folders are named like a column, and with signs of a formula."""
    out = tmp_path / "cmp"
    flags = ["--compare", write("number", 2.0, 0.3), write("_$x$", 1.5, 0.4), "--output_dir", str(out)]
    assert main(flags) == main(flags) == 0
    assert "-0.5000 ± 0.5000" in capsys.readouterr().out
    files = {"compare.json", "compare.md", "compare.png"}
    (again,) = out.glob("*Z")
    assert {path.name for path in out.iterdir()} == files | {again.name}
    assert {path.name for path in again.iterdir()} == files


def test_the_newest_of_an_archive_and_files_by_name(write, tmp_path):
    kept = tmp_path / "kept"
    kept.mkdir()
    names = {"20250101T000000Z": 2.0, "20250102T000000Z-2": 1.5, "20250102T000000Z-10": 1.0}
    for name, loss in names.items():
        os.rename(f"{write(name, loss)}/results.json", kept / f"{name}.json")
    result = compare(Arguments(compare=[str(kept / "20250101T000000Z.json"), str(kept)]))
    (rows,) = result.tables.values()
    assert rows[0]["kept - 20250101T000000Z.json"] == -1.0


def test_what_is_no_report_is_one_sentence(write, capsys):
    good = write("a")
    folder = write("b")
    file = f"{folder}/results.json"
    with open(file) as stream:
        record = json.load(stream)
    suite = record["results"]["perplexity"]
    forged = [
        record | {"schema_version": 9},
        record | {"config": None},
        record | {"pictures": {"perplexity": ["../a.png"]}},
        record | {"results": {"../x": {"tables": {}}}},
        record | {"results": {"perplexity": suite | {"tables": {"a": [1]}}}},
    ]
    for content in ["", "{", "[]", "[" * 100_000, '{"a": NaN}', *map(json.dumps, forged)]:
        with open(file, "w") as stream:
            stream.write(content)
        assert main(["--compare", good, folder]) == 2, content[:200]
        error = capsys.readouterr().err
        assert f"--compare {file}" in error and error.count("\n") == 1
    os.remove(file)
    os.mkfifo(file)
    assert main(["--compare", good, file]) == 2
    assert "--compare" in capsys.readouterr().err
