"""Fixtures of all tests: tiny models, folders that programs write once a run, and the settings of a process."""

import logging
import sys
from pathlib import Path

import pytest
import torch
import warm_python as warm_program
from hub_server import serve
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from training_process import training_process
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from hope_hf import HopeConfig, HopeForCausalLM


@pytest.fixture(autouse=True, scope="session")
def _flush_denormals():
    torch.set_flush_denormal(True)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """One worker runs all tests that read the folder of a run or an export, and makes it once."""
    for item in items:
        if {"trained_run", "exported"} & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.xdist_group("folders"))


class _Deprecated(logging.Handler):
    """Makes an error of what transformers calls deprecated in its log instead of a warning."""

    def emit(self, record: logging.LogRecord) -> None:
        told = record.getMessage()
        # the pipeline of transformers 5.17 itself passes both
        assert "deprecated" not in told or told.startswith("Passing `generation_config` together"), told


@pytest.fixture(autouse=True, scope="session")
def _deprecated_is_an_error():
    logging.getLogger("transformers").addHandler(_Deprecated(logging.WARNING))


@pytest.fixture
def warm_python(monkeypatch):
    """`sys.executable` has already imported the package: see `warm_python.py`."""
    monkeypatch.setattr(sys, "executable", warm_program.executable())


@pytest.fixture
def tiny_config():
    """Build a `HopeConfig` of two layers and two heads of 16, with chunks of few tokens."""
    return _tiny_config


def _tiny_config(**options) -> HopeConfig:
    defaults = dict(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        head_dim=16,
        num_attention_heads=2,
        num_memory_heads=2,
        retention_bias=[3.0, 8.0],
        memory_chunk_size=4,
        level_periods=[1, 4],
        level_intermediate_sizes=[24, 24],
    )
    return HopeConfig(**{**defaults, **options})


@pytest.fixture
def tiny_model():
    """Build a seeded `HopeForCausalLM` with memories that write strongly, in evaluation mode."""
    return _tiny_model


def _tiny_model(dtype: torch.dtype = torch.float32, seed: int = 0, **options) -> HopeForCausalLM:
    torch.manual_seed(seed)
    model = HopeForCausalLM(_tiny_config(**options)).to(dtype).eval()
    with torch.no_grad():
        for module in model.modules():
            if getattr(module, "is_initial_state", False):
                # far from the start, so that the logits show which document a memory holds
                layer = list(module.parameters())[-1]
                layer.normal_(std=layer.shape[-1] ** -0.5)
    return model


@pytest.fixture
def word_tokenizer() -> PreTrainedTokenizerFast:
    """Words w0 to w61, one token each, then <eos> and <pad>: the 64 entries of `tiny_config`."""
    return _word_tokenizer()


def _word_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {f"w{index}": index for index in range(62)} | {"<eos>": 62, "<pad>": 63}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    words.pre_tokenizer, words.decoder = pre_tokenizers.Whitespace(), decoders.Metaspace()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="<eos>", pad_token="<pad>", padding_side="left",
        chat_template="{% for message in messages %}w1 {{ message['content'] }} {% endfor %}w2",
    )  # fmt: skip


@pytest.fixture(scope="session")
def trained_run(tmp_path_factory) -> Path:
    """The folder of a finished run of two steps with a checkpoint each; layers of every kind. Copy it to change it."""
    # imported here: most test files run without the programs
    from hope_hf.training import main as train

    folder = tmp_path_factory.mktemp("trained")
    kinds = ["hope_memory", "full_attention", "window_attention", "sparse_attention", "retaining_attention"]
    windows = dict(sliding_window=6, attention_sinks=2, retained_block_size=4)
    model = _tiny_model(num_hidden_layers=5, layer_types=kinds, **windows)
    model.save_pretrained(folder / "start")
    _word_tokenizer().save_pretrained(folder / "start")
    text = folder / "my books" / "read.txt"
    text.parent.mkdir()
    text.write_text(" ".join(f"w{index * 7 % 62}" for index in range(2000)))
    flags = ["--model_name_or_path", str(folder / "start"), "--train_file", str(text), "--block_size", "16"]
    flags += ["--max_train_steps", "2", "--checkpointing_steps", "1", "--cpu_threads", "1"]
    flags += ["--output_dir", str(folder / "run")]
    with training_process() as patch:
        # the command that the run notes
        patch.setattr(sys, "argv", ["run_clm.py", *flags])
        assert train(flags) == 0
    return folder / "run"


@pytest.fixture(scope="session")
def exported(trained_run) -> Path:
    """`hope-hf export` of `trained_run`, which has loaded it in a process without the package. Do not change it."""
    from hope_hf.export import main as export

    folder = trained_run.parent / "small-hope"
    assert export([str(trained_run), "--to", str(folder), "--license", "mit"]) == 0
    return folder


@pytest.fixture(scope="session")
def converted(tmp_path_factory) -> Path:
    """`hope-hf convert` of a small Llama in the folder `llama` beside it. Do not change it."""
    from hope_hf.convert import main as convert

    folder = tmp_path_factory.mktemp("converted")
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2)
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=64, bos_token_id=None, eos_token_id=62, **sizes)
    LlamaForCausalLM(config).save_pretrained(folder / "llama")
    _word_tokenizer().save_pretrained(folder / "llama")
    assert convert(["--from", str(folder / "llama"), "--output_dir", str(folder / "hope")]) == 0
    return folder / "hope"


@pytest.fixture
def hub(monkeypatch):
    """A fake Hub that records what it receives."""
    with serve(monkeypatch) as standing_in:
        yield standing_in
