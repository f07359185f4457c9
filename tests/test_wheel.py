"""What is published: the sdist has every file of the repository, and the wheel made from it is enough by itself."""

import os
import shutil
import subprocess
import sys
import tarfile
import textwrap
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# What .gitignore names, and what git and pytest write.
NO_SOURCES = shutil.ignore_patterns(
    ".git", ".gitignore", ".venv", "__pycache__", "*.egg-info", "build", "dist", "runs", "wandb", ".*_cache"
)
SMALL = "hidden_size=64,num_hidden_layers=1,level_intermediate_sizes=[32],level_periods=[1],memory_chunk_size=16"

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("wheel")]


def python(code: str, folder: Path, **environment: str) -> str:
    """What a new interpreter prints that runs the code in a folder, without the sources in its path."""
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | environment
    command = [sys.executable, "-c", textwrap.dedent(code)]
    ended = subprocess.run(command, cwd=folder, env=clean, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def files_in(folder: Path) -> set[str]:
    """Their paths in the folder; without what the build itself writes there."""
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    return {name for name in names if "egg-info" not in name}


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> Path:
    """A folder with `sources`, a copy; `sdist`, what its archive holds; and `hope.whl`, the wheel made of that."""
    folder = tmp_path_factory.mktemp("published")
    shutil.copytree(ROOT, folder / "sources", symlinks=True, ignore=NO_SOURCES)
    build = "import setuptools.build_meta as backend; backend.build_{}('{}')"
    python(build.format("sdist", folder), folder / "sources")
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        opened.extractall(folder, filter="data")
    (folder / archive.name.removesuffix(".tar.gz")).rename(folder / "sdist")
    python(build.format("wheel", folder), folder / "sdist")
    return folder


def test_sdist_and_wheel_have_every_file(published):
    files = files_in(published / "sources")
    assert len(files) > 400 and files <= files_in(published / "sdist")
    (wheel,) = published.glob("*.whl")
    packed = set(zipfile.ZipFile(wheel).namelist())
    package = {name for name in files if name.startswith("hope_hf/")}
    assert len(package) > 150 and package | {"hope_hf_main.py"} <= packed
    assert not [name for name in packed if name.startswith("tests/")]


@pytest.mark.long
def test_the_wheel_alone_does_the_five_tasks_in_an_empty_folder(published, converted, tmp_path):
    site, folder = tmp_path / "site", tmp_path / "empty"
    folder.mkdir()
    (wheel,) = published.glob("*.whl")
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target"]
    subprocess.run([*install, str(site), str(wheel)], check=True)
    command = [str(site / "bin/hope-hf"), "--help"]
    environment = os.environ | {"PYTHONPATH": str(site)}
    shown = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert shown.stdout.startswith("usage: hope-hf COMMAND ..."), shown.stderr
    shutil.copytree(converted.parent / "llama", folder / "llama")
    printed = python(
        f"""
        import hope_hf
        from hope_hf_main import main

        assert hope_hf.__file__.startswith({str(site)!r})
        demo = ["--max_train_steps", "5", "--block_size", "32", "--max_eval_samples", "2", "--cpu_threads", "1"]
        demo += ["--config_overrides", {SMALL!r}, "--num_warmup_steps", "1"]
        assert main(["train", "--output_dir", "run", *demo]) == 0
        evaluate = ["--suite", "perplexity", "--lengths", "32", "--max_eval_samples", "2", "--cpu_threads", "1"]
        assert main(["eval", "--model_name_or_path", "run", *evaluate, "--output_dir", "evaluated"]) == 0
        assert main(["chat", "run", "--memory", "memory", "--prompt", "def f():", "--max_new_tokens", "4"]) == 0
        assert main(["generate", "run", "--memory", "memory", "--prompt", "def", "--max_new_tokens", "4"]) == 0
        assert main(["plan", "pilot.yaml", "--accelerate_config", "ddp.yaml"]) == 0
        assert main(["convert", "--from", "llama", "--output_dir", "converted"]) == 0
        assert main(["generate", "converted", "--prompt", "w5", "--max_new_tokens", "4"]) == 0
        assert main(["recipes"]) == main(["launch-files", "--copy", "ddp.yaml"]) == 0
        """,
        folder,
        PYTHONPATH=str(site),
        HF_HUB_OFFLINE="1",
    )
    assert "step 5/5" in printed and "evaluated" in printed and "demo.yaml" in printed
    names = {path.name for path in folder.iterdir()}
    assert names == {"llama", "run", "evaluated", "memory", "converted", "ddp.yaml"}
