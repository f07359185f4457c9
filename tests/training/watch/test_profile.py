"""`--profile_steps`: which steps are profiled, what is written, and where the table says their time went."""

import gzip
import json

import pytest
from training_runs import EVERY_FOURTH, forget_the_end

from hope_hf.training.flag_values import MOST_STEPS
from hope_hf.training.watch.profile import STEP


@pytest.mark.parametrize("value", ["12-10", "0-3", "3-", "²", f"1-{MOST_STEPS + 1}", "7-9"])
def test_other_values_are_refused(value, run, capsys, tmp_path):
    """The last one is behind the end of the run."""
    status, _ = run("a", f"--profile_steps={value}")
    assert status == 2 and "--profile_steps" in capsys.readouterr().err
    assert not (tmp_path / "a").exists()


def test_a_run_leaves_a_trace_and_a_table_and_never_writes_over_them(run, trained, tmp_path, capsys):
    """A run that goes on behind the first of its steps profiles the rest."""
    folder = trained("llama").copy(tmp_path / "a")
    forget_the_end(folder, 8)
    before = folder / "profile-5-6" / "trace_rank0.json.gz"
    before.parent.mkdir()
    before.write_text("mine")
    with pytest.warns(UserWarning, match="only 5-6 is profiled"):
        run("a", *EVERY_FOURTH, "--profile_steps", "3-6")
    assert before.read_text() == "mine"
    table = (folder / "profile-5-6.2" / "table.md").read_text()
    assert table in capsys.readouterr().out
    (row,) = [line.strip("|").split("|") for line in table.splitlines() if line.startswith("|    0")]
    whole, compute, communication = (float(cell) for cell in row[1:])
    assert whole > compute > 0 == communication
    with gzip.open(folder / "profile-5-6.2" / "trace_rank0.json.gz", "rt") as file:
        names = {event.get("name", "") for event in json.load(file)["traceEvents"]}
    assert {name for name in names if name.startswith(STEP)} == {f"{STEP}5", f"{STEP}6"} and "aten::mm" in names
    forget_the_end(folder, 8)
    with pytest.warns(UserWarning, match="nothing is profiled"):
        run("a", *EVERY_FOURTH, "--profile_steps", "3")
