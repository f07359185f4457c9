"""`hope-hf recipes` and `hope-hf launch-files`, and names of their files on other command lines."""

from pathlib import Path

import pytest

from hope_hf.common.packaged import LAUNCH_FILES, RECIPES, find_file, launch_files, recipes
from hope_hf.data import read_mixture
from hope_hf.plan.parsing import parse as parse_plan
from hope_hf.training.parsing import parse as parse_training

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("program", "kind"), [(recipes, RECIPES), (launch_files, LAUNCH_FILES)])
def test_every_file_is_listed_and_copied_once(program, kind, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    files = sorted((ROOT / kind).rglob("*.yaml"))
    assert program([]) == 0
    lines = capsys.readouterr().out.splitlines()
    for line, file in zip(lines, files, strict=False):
        assert line.split()[0] == str(file.relative_to(ROOT / kind))
    name = files[-1].relative_to(ROOT / kind)
    copied = tmp_path / "mine" / name
    copy = ["--copy", str(name), "--to", "mine"]
    assert program(copy) == 0
    assert copied.read_bytes() == files[-1].read_bytes()
    copied.write_text("changed")
    assert program(copy) == 2
    assert str(name) in capsys.readouterr().err and copied.read_text() == "changed"


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (["--copy", "dmo.yaml"], "demo.yaml"),
        (["--copy", "../recipes/demo.yaml"], "--copy"),
        (["--to", "x"], "--copy"),
        (["--copy", "demo.yaml", "--to", "file"], "--to file"),
    ],
)
def test_mistakes_are_one_sentence(words, match, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    assert recipes(words) == 2
    error = capsys.readouterr().err
    assert match in error and error.count("\n") == 1


def test_programs_find_them_by_name_in_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("pilot.yaml", "recipes/pilot.yaml"):
        assert parse_training([name, "--output_dir", "runs"]).config_name == "pilot"
        assert parse_plan([name, "--accelerate_config", "fsdp2.yaml"]).launch.strategy.launch_file == "fsdp2.yaml"
    assert "code" in {corpus.name for corpus in read_mixture("mixtures/pilot.yaml")}
    Path("pilot.yaml").write_text("config_name: mid")
    assert parse_training(["pilot.yaml", "--output_dir", "runs"]).config_name == "mid"
    assert find_file("other.yaml", RECIPES) == "other.yaml"
    with pytest.raises(ValueError, match="The recipe other.yaml cannot be read: No such file"):
        parse_training(["other.yaml", "--output_dir", "runs"])
