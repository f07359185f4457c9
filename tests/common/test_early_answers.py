"""What flags and names of files alone decide is answered without torch, transformers and data sets."""

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from hope_hf_main import COMMANDS

ROOT = Path(__file__).parents[2]
# Each takes a fifth of a second or more to be imported.
SLOW = ("torch", "transformers", "datasets", "accelerate", "numpy", "pyarrow", "tokenizers", "evaluate", "matplotlib")

# What follows the name of a command, and what the sentence says.
MISTAKES = [
    ("train", "--seed 1", "--output_dir is missing"),
    ("train", "missing.yaml", "The recipe missing.yaml cannot be read"),
    ("train", "--output_dir out --train_file missing.txt", "--train_file missing.txt does not exist"),
    ("train", "--output_dir out --train_file text.txt --validation_file x*", "--validation_file x* matches no file"),
    ("train", "--output_dir out --dataset_mixture missing.yaml", "--dataset_mixture missing.yaml cannot be read"),
    ("train", "--output_dir out --train_file text.txt --dataset_name x", "--train_file name the training text"),
    ("train", "--output_dir out --train_shards missing", "--train_shards missing is not a folder"),
    ("train", "--output_dir out --model_name_or_path ./missing", "--model_name_or_path ./missing does not exist"),
    ("train", "--output_dir out --config_name ./missing", "--config_name ./missing does not exist"),
    ("train", "--output_dir out --config_overrides x", "--config_overrides 'x' cannot be read"),
    ("train", "--output_dir text.txt", "--output_dir text.txt is a file"),
    ("train", "--output_dir text.txt/run", "--output_dir text.txt/run cannot be written"),
    ("train", "--output_dir out --resume_from_checkpoint missing", "--resume_from_checkpoint: missing is not a fold"),
    ("train", "--output_dir out --resume_from_checkpoint latest", "out holds no checkpoint"),
    ("train", "--output_dir run --seed 2", "holds another run: seed was 42 and is now 2"),
    ("train", "--output_dir run --seed 3", "repeat its flags to continue it (hope-hf train --output_dir run), or"),
    ("train", "--output_dir run --resume_from_checkpoint latest --seed 2", "seed was 42 and is now 2"),
    ("eval", "missing.yaml", "The recipe missing.yaml cannot be read"),
    ("eval", "--suite perplexity", "--suite perplexity needs a model"),
    ("eval", "./missing", "--model_name_or_path ./missing does not exist"),
    ("eval", "model --tokenizer_name ./missing", "--tokenizer_name ./missing does not exist"),
    ("eval", "model --validation_file missing.txt", "--validation_file missing.txt does not exist"),
    ("eval", "model --suite perplexty", "did you mean perplexity?"),
    ("eval", "model --suite needle --tasks keys", "--tasks keys is none of s-niah-1"),
    ("eval", "--compare missing run", "--compare missing holds no results.json"),
    ("generate", "./missing --prompt x", "MODEL ./missing does not exist"),
    ("generate", "model --prompt x --memory text.txt", "--memory text.txt is a file"),
    ("generate", "text.txt --prompt x", "MODEL text.txt is a file: name its folder."),
    ("generate", "model --no_such_flag", "There is no flag --no_such_flag; hope-hf generate --help lists the flags."),
    ("chat", "./missing", "MODEL ./missing does not exist"),
    ("chat", "model --file missing.txt", "--file missing.txt cannot be read"),
    ("chat", "model --tokenizer_name ./missing", "--tokenizer_name ./missing does not exist"),
    ("plan", "missing.yaml", "The recipe missing.yaml cannot be read"),
    ("plan", "--accelerate_config missing.yaml", "--accelerate_config missing.yaml cannot be read"),
    ("plan", "--model_name_or_path ./missing", "--model_name_or_path ./missing does not exist"),
    ("plan", "--config_name ./missing", "--config_name ./missing does not exist"),
    ("plan", "--train_file missing.txt", "--train_file missing.txt does not exist"),
    ("plan", "--plot missing/plan.png", "--plot missing/plan.png cannot be written"),
    ("prepare", "missing.yaml --tokenizer_name t --output_dir out", "The mixture missing.yaml cannot be read"),
    ("prepare", "mix.yaml --tokenizer_name ./t --output_dir out", "--tokenizer_name ./t does not exist"),
    ("tokenizer", "--files missing.txt --output_dir out", "--files missing.txt does not exist"),
    ("tokenizer", "--dataset_mixture missing.yaml --output_dir out", "--dataset_mixture missing.yaml cannot be read"),
    ("tokenizer", "--files text.txt --output_dir text.txt", "--output_dir text.txt is a file"),
    ("convert", "./missing --output_dir out", "--from ./missing does not exist"),
    ("convert", "text.txt --output_dir out", "--from text.txt is a file: name its folder."),
    ("convert", "model --output_dir run", "--output_dir run exists and is not an empty folder"),
    ("retain", "./missing --train_file text.txt --output_dir out", "MODEL ./missing does not exist"),
    ("retain", "model --train_file missing.txt --output_dir out", "--train_file missing.txt does not exist"),
    ("retain", "model --train_file text.txt --output_dir run", "--output_dir run exists and is not an empty folder"),
    ("export", "missing --to out", "missing is not a folder"),
    ("export", "run --to out --results missing.json", "--results missing.json is not a file"),
    ("export", "run --to run", "--to run exists and is not an empty folder"),
    ("checkpoints", "info missing", "missing is not a folder"),
    ("checkpoints", "verify run", "run has no manifest.json"),
    ("checkpoints", "consolidate run --to text.txt", "--to text.txt is a file"),
    ("plot", "missing", "missing holds no metrics.jsonl"),
    ("recipes", "--copy missing.yaml", "--copy missing.yaml does not exist"),
    ("launch-files", "--copy missing.yaml", "--copy missing.yaml does not exist"),
]

# Reads the command lines, and prints the status and standard error of each; an import of a slow module ends it.
RUN = f"""
import contextlib, io, json, sys
sys.path.insert(0, {str(ROOT)!r})

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {SLOW!r}:
            raise RuntimeError(f"imports {{name}}")

sys.meta_path.insert(0, Refuse())
from hope_hf_main import main
answers = []
for words in json.load(sys.stdin):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = main(words)
        except SystemExit as ended:
            status = ended.code
    answers.append([status, out.getvalue(), err.getvalue()])
print(json.dumps(answers))
"""


def seconds_of_children() -> float:
    """CPU time of the processes that this one has started and that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """By command line, the status of the program and what it printed to standard output and error."""
    folder = tmp_path_factory.mktemp("early")
    (folder / "text.txt").write_text("some text")
    (folder / "mix.yaml").write_text("corpora:\n  a:\n    files: text.txt\n    weight: 1\n")
    (folder / "model").mkdir()
    (folder / "run").mkdir()
    record = {"identity": {"seed": 42}, "complete": False, "run_id": "0a", "defaults": {}}
    record["command"] = ["/a/bin/hope-hf", "train", "--output_dir", "run"]
    (folder / "run" / "run.json").write_text(json.dumps(record))
    lines = [["--version"], ["--help"]]
    for name in COMMANDS:
        lines += [[name, "--help"], [name, "--no_such_flag", "1"]]
    lines += [[name, *words.split()] for name, words, _ in MISTAKES]
    command = [sys.executable, "-c", RUN]
    before = seconds_of_children()
    ended = subprocess.run(command, cwd=folder, input=json.dumps(lines), capture_output=True, text=True, timeout=100)
    seconds = seconds_of_children() - before
    assert ended.returncode == 0, ended.stderr[-2000:]
    found = {" ".join(words): answer for words, answer in zip(lines, json.loads(ended.stdout), strict=True)}
    found["seconds"] = seconds
    return found


@pytest.mark.processes
def test_help_and_wrong_flags_load_nothing_slow(answers):
    for name in COMMANDS:
        status, printed, error = answers[f"{name} --help"]
        assert (status, error) == (0, "") and printed.startswith(f"usage: hope-hf {name}")
        status, printed, error = answers[f"{name} --no_such_flag 1"]
        assert (status, printed) == (2, "") and error.startswith("error: ") and error.count("\n") == 1
    assert answers["--version"][0] == answers["--help"][0] == 0


@pytest.mark.processes
@pytest.mark.parametrize(("name", "words", "says"), MISTAKES, ids=[f"{name} {words}" for name, words, _ in MISTAKES])
def test_what_does_not_exist_is_answered_without_slow_imports(answers, name, words, says):
    status, _, error = answers[f"{name} {words}"]
    assert status == 2 and says in error, error


@pytest.mark.processes
def test_all_of_these_answers_take_a_few_seconds(answers):
    """Eighty command lines in one process; with torch and transformers each one alone would take five."""
    assert answers["seconds"] < 5


@pytest.mark.processes
@pytest.mark.parametrize("words", ["train --help", "eval ./missing"])
def test_a_command_answers_in_less_than_a_second(words, tmp_path):
    """The aim is 0.4 s of CPU time; it takes 0.2 s."""
    before = seconds_of_children()
    code = "import sys; sys.path.insert(0, sys.argv.pop(1)); from hope_hf_main import main; sys.exit(main())"
    command = [sys.executable, "-c", code, str(ROOT), *words.split()]
    subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=100)
    assert seconds_of_children() - before < 1
