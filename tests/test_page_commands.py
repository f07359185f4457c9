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
from datasets import Dataset, DatasetDict
from transformers import AutoTokenizer

from hope_hf import PRESETS, HopeConfig
from hope_hf.chat import flags as chat
from hope_hf.common import tokenizer_files
from hope_hf.common.models import build_config, load_config
from hope_hf.common.overrides import parse_overrides
from hope_hf.data import (
    build_data,
    documents,
    mixture,
    prepare,
    save_tokenizer,
    tokenizer,
    train_tokenizer,
)
from hope_hf.evaluation import flags as evaluation
from hope_hf.evaluation.held_out import held_out_documents
from hope_hf.evaluation.suites import SUITES
from hope_hf.plan import main as plan
from hope_hf.training.checkpoints import tool
from hope_hf.training.parsing import parse
from hope_hf.training.setup import data_config

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
    commands = []
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        if language:
            continue
        for line in block.replace("\\\n", " ").splitlines():
            if re.match("(accelerate|hope-hf|python|curl) ", line):
                commands.append(" ".join(line.split()))
    return commands


def commands_in_head(path: Path) -> list[str]:
    """The commands in the comments of a recipe or mixture."""
    commands = []
    for line in re.sub(r"\\\n#", " ", path.read_text(encoding="utf-8")).splitlines():
        found = COMMAND.match(" ".join(line.split()))
        if line.startswith("#") and found:
            commands.append(found[1])
    return commands


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """A working directory with the repository's recipes, and the files and runs that the pages name."""
    monkeypatch.chdir(tmp_path)
    for name in ("recipes", "accelerate_configs"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "books").mkdir()
    (tmp_path / "books" / "one.txt").write_text("\n<|endoftext|>\n".join(TEXTS[:200]))
    (tmp_path / "text.txt").write_text("\n\n".join(TEXTS[:9]))
    chats = ""
    for text in TEXTS[:99]:
        messages = [{"role": "user", "content": text[:9]}, {"role": "assistant", "content": text[9:]}]
        chats += json.dumps({"messages": messages}) + "\n"
    (tmp_path / "chats.jsonl").write_text(chats)
    page = (ROOT / "docs/data.md").read_text(encoding="utf-8")
    (tmp_path / "mix.yaml").write_text(re.search(r"```yaml\n(.*?)```", page, re.DOTALL)[1])
    small = train_tokenizer(TEXTS[:9], 300)
    for preset, run_name in (("mid", "mid"), ("target", "target"), ("tiny", "demo")):
        # The first phase of the runs of two phases, the run of the evaluation, and the model that learns to chat.
        HopeConfig.from_preset(preset, vocab_size=300).save_pretrained(tmp_path / "runs" / run_name)
        save_tokenizer(small, tmp_path / "runs" / run_name)
    small_hub(monkeypatch, small)
    return tmp_path


def small_hub(monkeypatch, small) -> None:
    """The Hub has a few small texts and one tokenizer, and mixtures have the limits of small texts."""

    class OfTheHub:
        @staticmethod
        def from_pretrained(name, **options):
            return AutoTokenizer.from_pretrained(name, **options) if os.path.isdir(name) else small

    def load_dataset(name, config_name=None, split=None, streaming=False, **options):
        texts = Dataset.from_dict({"content" if name == "bigcode/starcoderdata" else "text": TEXTS})
        if streaming:
            texts = texts.to_iterable_dataset()
        return texts if split else DatasetDict(train=texts)

    yaml_of = mixture.read_yaml

    def read_yaml(*words):
        content = yaml_of(*words)
        for corpus in content["corpora"].values():
            for limit, small_limit in (("max_tokens", 3000), ("min_length", 20)):
                if limit in corpus:
                    corpus[limit] = small_limit
        return content

    # Asked for adapters beside the names of tokenizers, it would try a network again and again.
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(tokenizer_files, "AutoTokenizer", OfTheHub)
    monkeypatch.setattr(documents, "load_dataset", load_dataset)
    monkeypatch.setattr(documents, "corpus_documents", lambda: [(f"{text[:9]}.py", text) for text in TEXTS[:300]])
    monkeypatch.setattr(mixture, "read_yaml", read_yaml)


def trains(words: list[str]) -> None:
    """Parse the command line of a training, build its data and its model's config."""
    args = parse([*words, "--block_size", str(BLOCK), "--per_device_train_batch_size", "2"])
    pretrained = None
    size = parse_overrides(args.config_overrides).get("vocab_size")
    if args.model_name_or_path:
        pretrained = load_config(args.model_name_or_path, "model_name_or_path", args)
        size = pretrained.vocab_size
    data = build_data(data_config(args, SimpleNamespace(device=torch.device("cpu")), pretrained, size))
    batch, _ = next(iter(data.train))
    assert batch["input_ids"].shape == (2, BLOCK) and len(data.validation)
    config = pretrained or build_config(args, data.tokenizer, size or len(data.tokenizer), PRESETS)
    assert config.vocab_size >= len(data.tokenizer)


def run(command: str) -> None:
    """One command of a page, in this process."""
    words = shlex.split(command)
    if "run_clm.py" in words:
        trains(words[words.index("run_clm.py") + 1 :])
        return
    if words[0] == "curl":
        Path(words[words.index("-o") + 1]).write_text("\n\n".join(TEXTS[:300]))
        return
    if words[0] == "hope-hf":
        words = words[1:]
    program, *words = words
    if program == "train":
        trains(words)
    elif program == "eval":
        assert held_out_documents(evaluation.parse(words, SUITES)).texts
    elif program == "plan":
        assert plan([*words]) == 0
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
    for index, words in enumerate(("curl", "hope-hf tokenizer", "hope-hf prepare")):
        if words in command:
            return index
    return 9


RECIPES = "docs/distributed.md", "Recipes"
CHATS, LORA = ("docs/fine_tuning.md", "Chats"), ("docs/fine_tuning.md", "LoRA")


@pytest.mark.parametrize("page, least", [(["docs/data.md"], 8), (RECIPES, 8), (CHATS, 2), (LORA, 2)])
def test_every_command_of_the_page_runs(page, least, folder):
    commands = [command for command in commands_of(*page) if not any(name in command for name in NOT_RUN)]
    assert len(commands) >= least
    for command in sorted(commands, key=in_order):
        run(command)


def test_every_command_in_the_heads_of_recipes_runs(folder):
    commands = {command for path in HEADS for command in commands_in_head(path)}
    on_the_page = set(commands_of(*RECIPES))
    assert len(commands & on_the_page) >= 8 and len(commands - on_the_page) >= 2
    for command in sorted(commands - on_the_page, key=in_order):
        run(command)
