"""`hope-hf recipes` and `hope-hf launch-files`, and names of their files on other command lines."""

from pathlib import Path

import pytest

from hope_hf.common.packaged import LAUNCH_FILES, RECIPES, find_file, launch_files, recipes
from hope_hf.data import read_mixture
from hope_hf.plan.parsing import parse as parse_plan
from hope_hf.training.parsing import parse as parse_training

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("program", "kind"), [(recipes, RECIPES), (launch_files, LAUNCH_FILES)])
def test_every_file_is_listed_with_what_it_is_and_copied_once(program, kind, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    folder = ROOT / kind
    files = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*.yaml"))}
    assert program([]) == 0
    for line, name in zip(capsys.readouterr().out.splitlines(), files, strict=False):
        shown, description = line.split(None, 1)
        assert shown == name and len(description) > 20
    for name, path in files.items():
        assert program(["--copy", name, "--to", "mine"]) == 0
        assert (tmp_path / "mine" / name).read_bytes() == path.read_bytes()
    copied = tmp_path / "mine" / name
    copied.write_text("changed")
    assert program(["--copy", name, "--to", "mine"]) == 2
    assert name in capsys.readouterr().err and copied.read_text() == "changed"


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
