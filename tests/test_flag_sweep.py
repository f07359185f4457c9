"""Every flag of every program with wrong values gives a sentence or a run, never a traceback; a fourth of the values
in the default suite.

Where a value is accepted, the program begins with a tiny model and text, and stops before it trains, reads or draws.
"""

import random
import shutil
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path

import datasets
import huggingface_hub
import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from transformers import LlamaConfig, LlamaForCausalLM

from hope_hf import HopeConfig, HopeForCausalLM, evaluation, training
from hope_hf.chat import flags as chat_flags
from hope_hf.chat import generate as chat_generate
from hope_hf.chat import main as chat_main
from hope_hf.chat import session as chat_session
from hope_hf.common import packaged
from hope_hf.common.parser import Parser
from hope_hf.common.run_arguments import GROUPS as TRAINING_FLAGS
from hope_hf.convert import folder as convert_folder
from hope_hf.convert import run as convert_program
from hope_hf.convert.check import Agreement
from hope_hf.data import documents, train_tokenizer
from hope_hf.data import prepare as prepare_program
from hope_hf.data import tokenizer as tokenizer_program
from hope_hf.evaluation import sample, suites
from hope_hf.evaluation.flags import GROUPS as EVALUATION_FLAGS
from hope_hf.evaluation.flags import suite
from hope_hf.evaluation.held_out import held_out_documents
from hope_hf.evaluation.result import SuiteResult
from hope_hf.export import folder as export_folder
from hope_hf.export import network
from hope_hf.export import run as export_program
from hope_hf.plan import main as plan_main
from hope_hf.plan.flags import make_parser as make_plan_parser
from hope_hf.retain import model as retain_model
from hope_hf.retain import run as retain_program
from hope_hf.training import trainer
from hope_hf.training.checkpoints import manifest, tool
from hope_hf.training.watch import plot

NUMBERS = ["", "one", "-1", "0", "0.5", "nan", "inf", "1e300", "4294967296", "9" * 5000]
WORDS = ["", " ", "-1", "a=b", "[" * 5000, "a=" + "[" * 5000, "&a [*a]", "\udcff", "\0"]
SWITCHES = ["", "maybe", "2", "true"]
# Flags that cannot be given with a flag.
EXCLUDED = {
    "--model_name_or_path": {"--model_type", "--config_overrides"},
    "--config_name": {"--model_type", "--config_overrides"},
    "--dataset_name": {"--train_file", "--validation_file", "--files"},
    "--dataset_mixture": {"--train_file", "--validation_file", "--files"},
    "--train_shards": {"--train_file", "--validation_file"},
}
WRITTEN = {"--output_dir", "--to"}


@dataclass(frozen=True)
class Program:
    """A program and a correct call of it: `words`, then flags with their values."""

    name: str
    main: Callable[[list[str]], int]
    parser: ArgumentParser
    words: tuple[str, ...] = ()
    flags: dict[str, str] = field(default_factory=dict)
    statuses: tuple[int, ...] = (0, 2)

    def lines(self, place: Path, every: int) -> Iterator[tuple[str, list[str]]]:
        """The name of every flag with the command lines that try it: one value in `every`, beginning elsewhere for
        each flag. `place` has the folder `empty`, the file `junk` that is not text, and is where outputs go."""
        actions = [action for action in self.parser._actions if action.dest != "help"]
        for number, action in enumerate(actions):
            # The output of one flag must not exist for the next one.
            is_output = bool(WRITTEN & set(action.option_strings))
            new = f"{place}/written" if is_output else str(place)
            names = ["empty", "junk", "n" * 300]
            values = [*WORDS, *(f"{place}/{name}" for name in names), f"{new}/missing/x", "/dev/null"]
            if action.type in (int, float):
                values = NUMBERS
            elif action.nargs in (0, "?"):
                values = SWITCHES
            for index in range(number % every, len(values), every):
                yield action.dest, self._line(action, values[index], f"{place}/{action.dest}_{index}")

    def _line(self, action, value: str, output: str) -> list[str]:
        flag = action.option_strings[0] if action.option_strings else None
        given = {name: word for name, word in self.flags.items() if name not in EXCLUDED.get(flag, ())}
        given |= dict.fromkeys(WRITTEN & given.keys(), output)
        if flag is None:
            return [*self.words[:-1], value, *_joined(given)]
        if action.nargs == 0:
            return [*self.words, *_joined(given), f"{flag}={value}"]
        return [*self.words, *_joined(given | {flag: value})]


def _joined(flags: dict[str, str]) -> list[str]:
    return [word for pair in flags.items() for word in pair]


@pytest.fixture
def place(tmp_path) -> Path:
    """A folder with a text, a HOPE with its tokenizer and metrics, a checkpoint of it, and a file that is not text."""
    place = tmp_path
    (place / "empty").mkdir()
    (place / "work").mkdir()
    (place / "junk").write_bytes(bytes(range(256)))
    generator = random.Random(0)
    texts = [" ".join(generator.choices("a memory reads what it has written".split(), k=30)) for _ in range(6)]
    (place / "text.txt").write_text("\n<|endoftext|>\n".join(texts), encoding="utf-8")
    (place / "mix.yaml").write_text(f"corpora: {{text: {{files: {place}/text.txt}}}}", encoding="utf-8")
    tokenizer = train_tokenizer(texts, 270)
    sizes = dict(hidden_size=16, num_hidden_layers=1, head_dim=16, level_intermediate_sizes=[16], level_periods=[64])
    model = HopeForCausalLM(HopeConfig(vocab_size=len(tokenizer), level_learning={}, **sizes))
    model.save_pretrained(place / "model")
    tokenizer.save_pretrained(place / "model")
    window = dict(layer_types=["window_attention"], sliding_window=64, max_position_embeddings=512)
    HopeForCausalLM(HopeConfig(vocab_size=len(tokenizer), **sizes, **window)).save_pretrained(place / "windows")
    tokenizer.save_pretrained(place / "windows")
    llama = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1)
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **llama)).save_pretrained(place / "llama")
    (place / "model" / "metrics.jsonl").write_text('{"step": 1, "tokens": 64}\n')
    checkpoint = manifest.temporary_name(place, 1, "0123456789ab")
    shutil.copytree(place / "model", checkpoint)
    manifest.publish(
        checkpoint,
        1,
        {"num_processes": 1, "only_model": True},
        manifest.describe(checkpoint, list(checkpoint.iterdir())),
        "0123456789ab",
    )
    return place


@pytest.fixture
def prepared(place, monkeypatch):
    """Cut off the expensive parts of all programs, and their requests to the Hub."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    # the built-in corpus is megabytes
    monkeypatch.setattr(documents, "corpus_documents", lambda: [(f"{n}.py", f"a memory reads {n}") for n in range(60)])
    monkeypatch.setattr(trainer.Loop, "run", lambda *begun: False)
    for name, read in (("perplexity", lambda args, _: held_out_documents(args)), ("sample", sample._prompts)):
        light = suite(*suites.SUITES[name].reads)(lambda *given, read=read: SuiteResult(text=str(read(*given))))
        monkeypatch.setitem(suites.SUITES, name, light)
    monkeypatch.setattr(export_folder, "check_export", lambda *made: "")
    monkeypatch.setattr(convert_folder, "check", lambda *made: Agreement(1, 0.0, 0.0, 0))
    monkeypatch.setattr(retain_model, "learn_to_retain", retaining)
    monkeypatch.setattr(chat_session.Session, "run", lambda *made: None)
    monkeypatch.setattr(network, "upload", lambda *made: "nowhere")
    monkeypatch.setattr(plot, "draw_curves", lambda folders, target: None)
    monkeypatch.chdir(place / "work")
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    _reset_accelerate()


def retaining(model, texts, mean: int, layers) -> HopeForCausalLM:
    """A new model of one layer that retains so many tokens."""
    return HopeForCausalLM(retain_model.retaining_config(model.config, layers or [0], [mean]))


def _reset_accelerate():
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def programs(place: Path) -> list[Program]:
    """All programs that take flags."""
    text, model = str(place / "text.txt"), str(place / "model")
    sizes = "hidden_size=16,intermediate_size=16,num_hidden_layers=1,num_attention_heads=1,num_key_value_heads=1"
    new = {"--model_type": "llama", "--config_overrides": sizes}
    data = {"--train_file": text, "--validation_file": text, "--tokenizer_name": model}
    short = {"--block_size": "16", "--max_train_steps": "1", "--cpu_threads": "1", "--output_dir": ""}
    read = {"--model_name_or_path": model, "--validation_file": text, "--cpu_threads": "1", "--output_dir": ""}
    few = {"--max_new_tokens": "1", "--cpu_threads": "1"}
    consolidate = tool.make_parser()._subparsers._group_actions[0].choices["consolidate"]
    return [
        Program("run_clm", training.main, Parser(TRAINING_FLAGS), flags=new | data | short),
        # 1: a suite that could not run.
        Program("run_eval", evaluation.main, Parser(EVALUATION_FLAGS), flags=read, statuses=(0, 1, 2)),
        Program("export", export_program.main, export_program.make_parser(), (model,), {"--to": ""}),
        Program(
            "convert",
            convert_program.main,
            convert_program.make_parser(),
            flags={"--from": str(place / "llama"), "--output_dir": ""},
        ),
        Program(
            "retain",
            retain_program.main,
            retain_program.make_parser(),
            (str(place / "windows"),),
            {"--train_file": text, "--output_dir": "", "--texts": "1", "--block_size": "256"},
        ),
        Program("chat", chat_main, chat_flags.make_parser(), (model,), {"--learn": "true", "--cpu_threads": "1"}),
        Program(
            "generate", chat_generate, chat_flags.make_generate_parser(), (model,), {"--prompt": "a memory"} | few
        ),
        Program(
            "tokenizer",
            tokenizer_program.main,
            tokenizer_program.make_parser(),
            flags={"--files": text, "--vocab_size": "260", "--output_dir": ""},
        ),
        Program(
            "prepare",
            prepare_program.main,
            prepare_program.make_parser(),
            (str(place / "mix.yaml"),),
            {"--tokenizer_name": model, "--output_dir": ""},
        ),
        Program("checkpoints", tool.main, consolidate, ("consolidate", str(place / "checkpoint-1")), {"--to": ""}),
        Program("plan", plan_main, make_plan_parser(), flags=new | {"--block_size": "16", "--simulate": "false"}),
        Program("plot", plot.main, plot.make_parser(), (model,)),
        Program(
            "recipes", packaged.recipes, packaged.make_parser("recipes"), flags={"--copy": "demo.yaml", "--to": ""}
        ),
        Program("launch-files", packaged.launch_files, packaged.make_parser("launch-files")),
    ]


NAMES = ["run_clm", "run_eval", "export", "convert", "chat", "tokenizer", "prepare", "checkpoints", "plan", "plot"]
NAMES.insert(5, "generate")
NAMES += ["recipes", "launch-files", "retain"]


@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.long), 4])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_no_flag_ends_in_a_traceback(name, every, place, prepared, capsys, monkeypatch):
    if name == "run_eval":
        # to list all tasks takes seconds
        known = import_module("lm_eval.tasks").TaskManager

        def without_defaults(include_defaults, **options):
            return known(include_defaults=False, **options)

        monkeypatch.setattr("lm_eval.tasks.TaskManager", without_defaults)
    program = {program.name: program for program in programs(place)}[name]
    failed = []
    for flag, line in program.lines(place, every):
        _reset_accelerate()
        try:
            status = program.main(line)
        # Also SystemExit, with which argparse would end the program.
        except BaseException as error:
            status = f"{type(error).__name__}: {error}"
        lines = capsys.readouterr().err.splitlines()
        errors = {text for text in lines if text.startswith("error: ")}
        # The error names the flag, or one that does not fit with it.
        is_named = all(flag == "dir" or flag in error.lower() or "--" in error for error in errors)
        has_one_error = len(errors) == (0 if status == 0 else 1)
        if status not in program.statuses or not has_one_error or not is_named:
            failed.append((status, flag, line[-1][:40], str(errors)[:300]))
    assert not failed, "\n".join(map(str, failed))
