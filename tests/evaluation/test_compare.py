"""Reports side by side."""

import copy
import json
import os
import warnings

import pytest

from hope_hf.evaluation import main
from hope_hf.evaluation.compare import as_page, compare, write_comparison
from hope_hf.evaluation.flags import Arguments


@pytest.fixture
def reports(tmp_path):
    """Three folders with reports, the last without errors and of another limit."""

    def write(name: str, loss: float, stderr: float | None, **config) -> str:
        rows = [{"documents": 2, "n": 10, "loss": loss, "loss_stderr": stderr}]
        record = {
            "schema_version": 1,
            "config": {"suite": "perplexity", "limit": None, "output_dir": name} | config,
            "results": {"perplexity": {"tables": {"Text: x": rows}, "samples": {}}},
        }
        (tmp_path / name).mkdir()
        (tmp_path / name / "results.json").write_text(json.dumps(record))
        return str(tmp_path / name)

    return [write("a", 2.0, 0.3), write("b", 1.5, 0.4), write("c", 1.0, None, limit=3)]


def test_differences_have_their_standard_errors(reports):
    with pytest.warns(UserWarning, match=r"a and c were evaluated with other flags: --limit \(None and 3\)"):
        (rows,) = compare(Arguments(compare=reports)).tables.values()
    (row,) = rows
    assert (row["number"], row["a"], row["b_stderr"]) == ("loss", 2.0, 0.4)
    assert (row["b - a"], row["b - a_stderr"]) == (-0.5, pytest.approx(0.5))
    assert (row["c - a"], row["c - a_stderr"]) == (-1.0, None)


def test_a_table_and_a_figure_are_written_once(reports, tmp_path, capsys):
    flags = ["--compare", *reports[:2], "--output_dir", str(tmp_path / "cmp")]
    assert main(flags) == 0
    assert "-0.5000 ± 0.5000" in capsys.readouterr().out
    assert sorted(path.name for path in (tmp_path / "cmp").iterdir()) == ["compare.json", "compare.md", "compare.png"]
    with pytest.warns(UserWarning, match="--suite is ignored: --compare evaluates nothing"):
        assert main([*flags, "--suite", "sample"]) == 0
    assert "holds a report already: this one goes to" in capsys.readouterr().out
    assert len(list((tmp_path / "cmp").glob("*Z/compare.json"))) == 1


def test_numbers_of_one_report_only(reports, tmp_path):
    path = tmp_path / "b" / "results.json"
    path.write_text(path.read_text().replace("Text: x", "By corpus"))
    first, second = compare(Arguments(compare=reports[:2])).tables.values()
    assert (first[0]["b"], first[0]["b - a"], second[0]["a"]) == (None, None, None)


def test_numbers_of_different_texts_have_a_difference_and_a_warning(reports, tmp_path):
    path = tmp_path / "b" / "results.json"
    path.write_text(path.read_text().replace("Text: x", "Text: y"))
    with pytest.warns(UserWarning, match="a and b read different texts, x and y"):
        tables = compare(Arguments(compare=reports[:2])).tables
    assert [*tables] == ["perplexity: Text: x"] and tables["perplexity: Text: x"][0]["b - a"] == -0.5


def test_the_newest_of_an_archive_and_files_by_name(reports, tmp_path):
    archive = tmp_path / "kept"
    archive.mkdir()
    for name, time in zip("ab", ("20250101T000000Z", "20250102T000000Z"), strict=True):
        (tmp_path / name / "results.json").rename(archive / f"{time}.json")
    (rows,) = compare(Arguments(compare=[str(archive / "20250101T000000Z.json"), str(archive)])).tables.values()
    assert rows[0]["kept - 20250101T000000Z.json"] == -0.5


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "holds no results.json and no archived report"),
        ("{", "results.json is no report of hope-hf eval"),
        ("[]", "results.json is no report of hope-hf eval"),
        ('{"schema_version": 9, "config": {}, "results": {}}', "has schema_version 9, not 1: evaluate again"),
    ],
)
def test_what_is_no_report(reports, tmp_path, content, sentence, capsys):
    (tmp_path / "d").mkdir()
    if content:
        (tmp_path / "d" / "results.json").write_text(content)
    assert main(["--compare", reports[0], str(tmp_path / "d"), "--output_dir", str(tmp_path / "cmp")]) == 2
    error = capsys.readouterr().err
    assert sentence in error and "--compare" in error and error.count("\n") == 1
    assert not (tmp_path / "cmp").exists()
    assert main(["--compare", reports[0]]) == 2
    assert "--compare needs two reports or more" in capsys.readouterr().err


WRONG = [None, True, -1, 10**400, 1e308, float("nan"), "", "$x$ _y", [], [[]], [1], {}, {"a": {}}, {"": [{"a": None}]}]


def places(value: object, at: tuple = ()):
    """The path of every value in a JSON value."""
    yield at
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in parts:
        yield from places(part, (*at, key))


def test_a_forged_report_is_one_sentence(reports, tmp_path, monkeypatch):
    """Every value of a report replaced by values of other kinds: a comparison, or a ValueError that names the file."""
    drawn = []
    monkeypatch.setattr("hope_hf.evaluation.compare.dots", lambda path, panels: drawn.append(panels))
    path = tmp_path / "b" / "results.json"
    record = json.loads(path.read_text()) | {"model": {"step": 1, "tokens": 2}, "seconds": 1.0, "unfinished": ["x"]}
    record["pictures"], record["failed"] = {"perplexity": ["a.png"]}, {}
    rows = record["results"]["perplexity"]["tables"]["Text: x"]
    rows[0] |= {"metric": "acc", "value": 1.0, "value_stderr": 0.1, "length": 3}
    refused = 0
    for at in places(record):
        for wrong in WRONG:
            forged = copy.deepcopy(record)
            owner = forged
            for key in at[:-1]:
                owner = owner[key]
            if at:
                owner[at[-1]] = wrong
            path.write_text(json.dumps(forged if at else wrong))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    result = compare(Arguments(compare=reports[:2]))
                    assert as_page(result) and write_comparison(Arguments(compare=[]), result, tmp_path / "cmp")
                except ValueError as error:
                    refused += 1
                    assert str(error).startswith("--compare ") and "\n" not in str(error), (at, wrong)
    assert 100 < refused < 400 and len(drawn) > 100


@pytest.mark.parametrize("content", ["[" * 100_000, '{"a": NaN}', "\udc80"])
def test_what_is_no_json_is_one_sentence(reports, tmp_path, content, capsys):
    (tmp_path / "b" / "results.json").write_bytes(content.encode("utf-8", "surrogateescape"))
    assert main(["--compare", *reports[:2]]) == 2
    error = capsys.readouterr().err
    assert "results.json is no report of hope-hf eval" in error and error.count("\n") == 1


def test_a_report_that_is_a_pipe_is_refused(reports, tmp_path, capsys):
    os.mkfifo(tmp_path / "pipe")
    assert main(["--compare", reports[0], str(tmp_path / "pipe")]) == 2
    assert "pipe is no report of hope-hf eval: it is not a regular file" in capsys.readouterr().err


def test_folders_named_like_columns_and_with_signs_of_formulas(reports, tmp_path):
    for name, other in (("a", "number"), ("b", "_$x$")):
        (tmp_path / name).rename(tmp_path / other)
    flags = ["--compare", str(tmp_path / "number"), str(tmp_path / "_$x$"), "--output_dir", str(tmp_path / "cmp")]
    assert main(flags) == 0
    assert (tmp_path / "cmp" / "compare.png").exists()
    assert "number (1)" in (tmp_path / "cmp" / "compare.md").read_text()
