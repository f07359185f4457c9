"""Documents that share a row never see each other, whatever the model, its attention and its cache.

transformers' Llama lets them see each other where it makes a cache, which is its default, also in training.
"""

import functools

import pytest
import torch
from training_runs import LLAMA
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaModel

from hope_hf import HopeModel
from hope_hf.convert import main as convert

# PEFT asks transformers 5.23 for attributes by their older names.
pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning")


def read_apart(forward, trunk, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Hidden states [B, T, hidden_size] of rows `ids` [B, T] whose documents are read one by one."""
    rows = []
    for row, begins in zip(ids, positions == 0, strict=True):
        starts = begins.nonzero().flatten().tolist()
        documents = row.tensor_split(starts[1:] if starts[0] == 0 else starts)
        read = [forward(trunk, input_ids=text[None], use_cache=False).last_hidden_state for text in documents]
        rows.append(torch.cat(read, dim=1))
    return torch.cat(rows)


@pytest.fixture
def compared(monkeypatch) -> list[bool]:
    """Compares what a trunk makes of packed rows with their documents alone; whether each such call was training."""
    calls = []

    def watch(kind):
        forward = kind.forward

        @functools.wraps(forward)
        def compare(self, input_ids=None, position_ids=None, **options):
            outputs = forward(self, input_ids=input_ids, position_ids=position_ids, **options)
            if position_ids is not None and (position_ids[:, 1:] == 0).any():
                with torch.no_grad():
                    expected = read_apart(forward, self, input_ids, position_ids)
                torch.testing.assert_close(outputs.last_hidden_state, expected, rtol=0, atol=2e-5)
                calls.append(torch.is_grad_enabled())
            return outputs

        monkeypatch.setattr(kind, "forward", compare)

    watch(LlamaModel)
    watch(HopeModel)
    return calls


@pytest.fixture(scope="module")
def saved(tmp_path_factory, corpus) -> dict[str, str]:
    """Folders of a Llama with the corpus's tokenizer, and of the HOPE that it is converted to."""
    place = tmp_path_factory.mktemp("saved")
    tokenizer = AutoTokenizer.from_pretrained(corpus[-1])
    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes)).save_pretrained(place / "llama")
    tokenizer.save_pretrained(place / "llama")
    assert convert(["--from", str(place / "llama"), "--output_dir", str(place / "hope")]) == 0
    return {name: str(place / name) for name in ("llama", "hope")}


def test_the_trainer_keeps_the_documents_of_a_row_apart(run, saved, compared):
    """It reads in training and in evaluation; at the end it generates."""
    flags = ["--block_size", "96", "--max_train_steps", "1"]
    for name, model in {"new": LLAMA, "hope": ["--model_name_or_path", saved["hope"], "--lora_rank", "2"]}.items():
        compared.clear()
        assert run(name, *flags, model=model)[0] == 0
        assert {*compared} == {True, False}, name
