"""Every command of the pages about data, fine-tuning and recipes, and of the recipes' heads runs, on small texts.

A training is read, its data are built and its model's config is made; tests/training/test_recipes.py trains.
"""

import json
import os
import re
import shlex
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from datasets import Dataset, DatasetDict
from transformers import AutoTokenizer

from hope_hf import PRESETS, HopeConfig
from hope_hf.chat import flags as chat
from hope_hf.common.models import build_config, load_config, parse_overrides
from hope_hf.data import (
    build_data,
    documents,
    mixture,
    prepare,
    save_tokenizer,
    tokenizer,
    train_tokenizer,
    vocabulary,
)
from hope_hf.evaluation import flags as evaluation
from hope_hf.evaluation.held_out import held_out_documents
from hope_hf.evaluation.suites import SUITES
from hope_hf.plan import main as plan
from hope_hf.training import finish, main
from hope_hf.training.checkpoints import tool
from hope_hf.training.parsing import parse
from hope_hf.training.setup import data_config
from hope_hf.training.watch import plot

ROOT = Path(__file__).parents[1]
HEADS = sorted((ROOT / "recipes").rglob("*.yaml"))
COMMAND = re.compile(r"^.*?((?:accelerate launch|hope-hf|python|curl|run_clm\.py) .*)$")
# These need a package that is not installed, and minutes; their flags are checked in test_docs.py.
NOT_RUN = ("filter.py",)
TEXTS = [
    f"{number} times {number + 1} are {number * (number + 1)}, as everybody knows. " * 5 for number in range(1000)
]
BLOCK = 32


def commands_of(page: str, chapter: str = "") -> list[str]:
    """The lines of the shell blocks, with what `\\` continues joined; of a page, or of a chapter of it."""
    text = (ROOT / page).read_text(encoding="utf-8")
    if chapter:
        text = text.split(f"\n## {chapter}\n")[1].split("\n## ")[0]
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    text = "".join(block for language, block in blocks if not language)
    lines = text.replace("\\\n", " ").splitlines()
    return [" ".join(line.split()) for line in lines if re.match("(accelerate|hope-hf|python|curl) ", line)]


def commands_in_head(path: Path) -> list[str]:
    """The commands in the comments of a recipe or mixture."""
    text = re.sub(r"\\\n#", " ", path.read_text(encoding="utf-8"))
    lines = (" ".join(line.split()) for line in text.splitlines() if line.startswith("#"))
    return [found[1] for line in lines if (found := COMMAND.match(line))]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working directory with the repository's recipes, where the Hub has a few small texts and one tokenizer."""
    monkeypatch.chdir(tmp_path)
    # else a machine without a network tries again and again
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    for name in ("recipes", "accelerate_configs"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "books").mkdir()
    (tmp_path / "books" / "one.txt").write_text("\n<|endoftext|>\n".join(TEXTS[:200]))
    page = (ROOT / "docs/data.md").read_text(encoding="utf-8")
    (tmp_path / "mix.yaml").write_text(re.search(r"```yaml\n(.*?)```", page, re.DOTALL)[1])
    small = train_tokenizer(TEXTS[:9], 300)
    for preset, run_name in (("mid", "mid"), ("target", "target"), ("tiny", "demo")):
        # The first phase of the runs of two phases, the run of the evaluation, and the model that learns to chat.
        HopeConfig.from_preset(preset, vocab_size=300).save_pretrained(tmp_path / "runs" / run_name)
        save_tokenizer(small, tmp_path / "runs" / run_name)
    (tmp_path / "text.txt").write_text("\n\n".join(TEXTS[:9]))
    chats = [
        [{"role": "user", "content": text[:9]}, {"role": "assistant", "content": text[9:]}] for text in TEXTS[:99]
    ]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in chats))

    class OfTheHub:
        @staticmethod
        def from_pretrained(name, **options):
            return AutoTokenizer.from_pretrained(name, **options) if os.path.isdir(name) else small

    def load_dataset(name, config_name=None, split=None, streaming=False, **options):
        texts = Dataset.from_dict({"content" if name == "bigcode/starcoderdata" else "text": TEXTS})
        texts = texts.to_iterable_dataset() if streaming else texts
        return texts if split else DatasetDict(train=texts)

    def read_yaml(*words):
        found = yaml_of(*words)
        for corpus in found["corpora"].values():
            corpus |= {"max_tokens": 3000} if "max_tokens" in corpus else {}
            # So that the small texts pass.
            corpus |= {"min_length": 20} if "min_length" in corpus else {}
        return found

    yaml_of = mixture.read_yaml
    # Asked for adapters beside the names of tokenizers, it would wait for a network.
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(vocabulary, "AutoTokenizer", OfTheHub)
    monkeypatch.setattr(documents, "load_dataset", load_dataset)
    monkeypatch.setattr(documents, "corpus_documents", lambda: [(f"{text[:9]}.py", text) for text in TEXTS[:300]])
    monkeypatch.setattr(mixture, "read_yaml", read_yaml)
    return tmp_path


def trains(words: list[str]) -> None:
    """Parse the command line of a training, build its data and its model's config."""
    args = parse([*words, "--block_size", str(BLOCK), "--per_device_train_batch_size", "2"])
    pretrained = load_config(args.model_name_or_path, "model_name_or_path", args) if args.model_name_or_path else None
    size = pretrained.vocab_size if pretrained else parse_overrides(args.config_overrides).get("vocab_size")
    data = build_data(data_config(args, SimpleNamespace(device=torch.device("cpu")), pretrained, size))
    batch, _ = next(iter(data.train))
    assert batch["input_ids"].shape == (2, BLOCK) and len(data.validation)
    config = pretrained or build_config(args, data.tokenizer, size or len(data.tokenizer), PRESETS)
    assert config.vocab_size >= len(data.tokenizer)


def run(command: str) -> None:
    """One command of a page, in this process."""
    words = shlex.split(command)
    if words[0] == "hope-hf":
        words = words[1:]
    if "run_clm.py" in words:
        trains(words[words.index("run_clm.py") + 1 :])
    elif words[0] == "train":
        trains(words[1:])
    elif words[0] == "curl":
        Path(words[words.index("-o") + 1]).write_text("\n\n".join(TEXTS[:300]))
    elif words[0] == "eval":
        args = evaluation.parse(words[1:], SUITES)
        assert held_out_documents(args).texts
    else:
        program, *words = words
        if program == "plan":
            assert plan([*words, "--no_simulate"]) == 0
        elif program == "tokenizer":
            # As many entries as the small texts have pairs to merge.
            assert tokenizer.main([*words, "--vocab_size", "300"]) == 0
        elif program == "chat":
            # tests/chat talks.
            assert chat.make_parser().parse_args(words)
        elif program == "checkpoints":
            # It reads what a run of hours leaves; tests/training/checkpoints has small ones.
            assert tool.make_parser().parse_args(words)
        else:
            assert program == "prepare"
            # Processes take seconds to start; tests/data/test_prepare.py has them.
            assert prepare.main([*words, "--num_proc", "1"]) == 0


def in_order(command: str) -> int:
    """Files and tokenizers first, which other commands read, then shards."""
    return next(
        (index for index, word in enumerate(("curl", "hope-hf tokenizer", "hope-hf prepare")) if word in command), 9
    )


RECIPES = "docs/distributed.md", "Recipes"
CHATS, LORA = ("docs/fine_tuning.md", "Chats"), ("docs/fine_tuning.md", "LoRA")


@pytest.mark.parametrize("page, least", [(["docs/data.md"], 8), (RECIPES, 8), (CHATS, 2), (LORA, 2)])
def test_every_command_of_the_page_runs(page, least, folder):
    commands = [command for command in commands_of(*page) if not any(name in command for name in NOT_RUN)]
    assert len(commands) >= least
    for command in sorted(commands, key=in_order):
        run(command)


def test_every_command_about_going_on_trains(folder, monkeypatch, capsys):
    """What docs/running.md says of going on, and its sweep, in order, with a hundredth of a tiny model's steps."""
    (folder / "empty").mkdir()
    monkeypatch.chdir(folder / "empty")
    monkeypatch.setattr(finish, "SAMPLE_TOKENS", 2)
    monkeypatch.setattr(finish, "draw_curves", lambda *arguments: None)
    # Every run of the demo trains a tokenizer on it.
    monkeypatch.setattr(documents, "corpus_documents", lambda: [("a.py", text) for text in TEXTS[:40]])
    tiny = "--block_size 32 --cpu_threads 1 --max_eval_samples 2 --num_warmup_steps 1 --config_overrides "
    tiny += "hidden_size=64,num_hidden_layers=1,memory_chunk_size=8"
    sweep = re.search(r"for (\w+) in (.+?); do (.+?); done", (ROOT / "docs/running.md").read_text(encoding="utf-8"))
    loop = [sweep[3].replace(f"${sweep[1]}", value) + " --max_train_steps 200" for value in sweep[2].split()]
    commands = commands_of("docs/running.md", "Continue, extend, fork")
    assert len(commands) == 12 and len(loop) == 3
    for name in ("book.txt", "more.txt"):
        Path(name).write_text(f"{name} is a text. " * 99)
    for command in commands + loop:
        # a loaded model has its own shape
        own = tiny.partition(" --config_overrides")[0] if "--model_name_or_path" in command else tiny
        words = [re.sub(r"\b(\d+)00\b", r"\1", word) for word in shlex.split(f"{command} {own}")]
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
        assert main(words[2:]) == 0, (command, capsys.readouterr().err)
    torch.set_flush_denormal(False)
    told = capsys.readouterr().out
    for line in ("Stopped at step 2", "begins again there", "as if it had begun", "learning_rate was", "rows_per"):
        assert line in told
    assert plot.main(sorted(map(str, Path("runs").glob("rate-*")))) == 0
    table = capsys.readouterr().out
    assert "learning_rate" in table and "0.002" in table and "lr_scheduler" not in table


def test_every_command_in_the_heads_of_recipes_runs(folder):
    commands = {command for path in HEADS for command in commands_in_head(path)}
    on_the_page = set(commands_of(*RECIPES))
    assert len(commands & on_the_page) >= 8 and len(commands - on_the_page) >= 2
    for command in sorted(commands - on_the_page, key=in_order):
        run(command)
