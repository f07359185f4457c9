"""Fixtures of all tests: tiny configurations, and the settings that a process of the project makes."""

import logging
import sys

import pytest
import torch
import warm_python as warm_program
from hub_server import serve
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hope_hf import HopeConfig, HopeForCausalLM


@pytest.fixture(autouse=True, scope="session")
def _flush_denormals():
    torch.set_flush_denormal(True)


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

    def build(**options) -> HopeConfig:
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

    return build


@pytest.fixture
def tiny_model(tiny_config):
    """Build a seeded `HopeForCausalLM` with memories that write strongly, in evaluation mode."""

    def build(dtype: torch.dtype = torch.float32, seed: int = 0, **options) -> HopeForCausalLM:
        torch.manual_seed(seed)
        model = HopeForCausalLM(tiny_config(**options)).to(dtype).eval()
        with torch.no_grad():
            for module in model.modules():
                if getattr(module, "is_initial_state", False):
                    # far from the start, so that the logits show which document a memory holds
                    layer = list(module.parameters())[-1]
                    layer.normal_(std=layer.shape[-1] ** -0.5)
        return model

    return build


@pytest.fixture
def word_tokenizer() -> PreTrainedTokenizerFast:
    """Words w0 to w61, one token each, then <eos> and <pad>: the 64 entries of `tiny_config`."""
    vocabulary = {f"w{index}": index for index in range(62)} | {"<eos>": 62, "<pad>": 63}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    words.pre_tokenizer, words.decoder = pre_tokenizers.Whitespace(), decoders.Metaspace()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="<eos>", pad_token="<pad>", padding_side="left",
        chat_template="{% for message in messages %}w1 {{ message['content'] }} {% endfor %}w2",
    )  # fmt: skip


@pytest.fixture
def hub(monkeypatch):
    """A fake Hub that records what it receives."""
    with serve(monkeypatch) as standing_in:
        yield standing_in
