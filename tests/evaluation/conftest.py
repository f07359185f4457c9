"""Saved models of two kinds with a byte-level tokenizer, and a text with documents of several lengths."""

import random

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Mamba2Config, Mamba2ForCausalLM

from hope_hf import HopeConfig, HopeForCausalLM
from hope_hf.data import train_tokenizer
from hope_hf.evaluation.flags import Arguments
from hope_hf.evaluation.subject import Subject, load_subject

WORDS = "the memory of a model reads and writes while it learns what was said before in this long text".split()

# An untrained model learns little at the defaults.
TEACHES = dict(periods=[32], rate=2.0, drift=50.0, gate=False, brake=0.0)
LAYERS = {
    "memories": dict(layer_types=["hope_memory"] * 2),
    "attention": dict(layer_types=["full_attention"] * 2, max_position_embeddings=512),
    "window": dict(layer_types=["window_attention", "retaining_attention"], sliding_window=24)
    | dict(retained_block_size=16, max_position_embeddings=64),
}


@pytest.fixture(autouse=True)
def _process_settings():
    """`--cpu_threads` of a program that runs in the test's process is for this test alone."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def texts() -> list[str]:
    """Documents of 30 to 400 words."""
    generator = random.Random(1)
    return [" ".join(generator.choices(WORDS, k=size)) for size in (30, 400, 75, 300, 120)]


@pytest.fixture(scope="session")
def tokenizer(texts):
    return train_tokenizer(texts, 300)


@pytest.fixture(scope="session")
def text_file(texts, tmp_path_factory):
    file = tmp_path_factory.mktemp("text") / "held_out.txt"
    file.write_text("\n<|endoftext|>\n".join(texts), encoding="utf-8")
    return str(file)


@pytest.fixture(scope="session")
def folders(tokenizer, tmp_path_factory) -> dict[str, str]:
    """Folders of an untrained HOPE whose memories write strongly, and of others.

    A Llama with 512 positions, a GPT-2 with only 160 learned ones, and a Mamba-2, whose config holds an infinity.
    """
    torch.manual_seed(3)
    sizes = dict(vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=2)
    chunks = dict(memory_chunk_size=8, level_intermediate_sizes=[32], level_periods=[1])
    hope = HopeForCausalLM(HopeConfig(head_dim=16, **chunks, **sizes))
    # others do not depend on how many numbers HOPE draws
    torch.manual_seed(1)
    llama = LlamaConfig(num_attention_heads=2, intermediate_size=48, max_position_embeddings=512, **sizes)
    gpt2 = GPT2Config(vocab_size=len(tokenizer), n_embd=32, n_layer=1, n_head=2, n_positions=160)
    mamba2 = Mamba2Config(num_heads=4, head_dim=16, n_groups=1, state_size=8, chunk_size=16, **sizes)
    others = {"llama": LlamaForCausalLM(llama), "gpt2": GPT2LMHeadModel(gpt2), "mamba2": Mamba2ForCausalLM(mamba2)}
    with torch.no_grad():
        for block in hope.model.layers:
            block.mixer.initial_memory.weight.normal_(std=0.25)
            # untrained, every logit is almost zero: this makes the memory's content visible in them
            block.mixer.o_proj.weight.mul_(20)
    result = {}
    for name, model in {"hope": hope, **others}.items():
        result[name] = str(tmp_path_factory.mktemp(name))
        model.save_pretrained(result[name])
        tokenizer.save_pretrained(result[name])
    return result


@pytest.fixture
def arguments(text_file):
    """Build `Arguments` for the text."""

    def build(**options) -> Arguments:
        return Arguments(**{"validation_file": text_file, "device": "cpu", **options})

    return build


@pytest.fixture
def subject(folders, arguments):
    """Load a `Subject` by kind."""
    return lambda kind="hope", **options: load_subject(arguments(model_name_or_path=folders[kind], **options))


@pytest.fixture
def learner(tokenizer):
    """A small untrained model with these layers, whose levels learn."""

    def build(kind="attention", dtype=torch.float32, learning=(), **options) -> Subject:
        torch.manual_seed(5)
        options = dict(level_periods=[1], level_intermediate_sizes=[48]) | LAYERS[kind] | options
        sizes = dict(vocab_size=len(tokenizer), hidden_size=32, head_dim=16, num_hidden_layers=2, memory_chunk_size=8)
        model = HopeForCausalLM(HopeConfig(level_learning=TEACHES | dict(learning), **sizes, **options))
        return Subject(model.to(dtype).eval(), tokenizer)

    return build
