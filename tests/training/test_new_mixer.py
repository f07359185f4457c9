"""A new kind of layer is a class and a line: this one trains, is loaded, packs and is planned."""

import json
from typing import NamedTuple

import pytest
import torch
from torch import nn
from training_runs import HOPE

from hope_hf import HopeConfig, HopeForCausalLM
from hope_hf.model.layers import LearnedFactors, Mixer
from hope_hf.model.mixers import MIXERS, register
from hope_hf.plan import main as plan


class ToyState(NamedTuple):
    """The sum so far [B, hidden_size]."""

    total: torch.Tensor


class ToyMixer(Mixer, nn.Module):
    """`s_t = d s_{t-1} + v_t` over the tokens of a document, with a learned `d` for every channel."""

    state_class = ToyState
    is_recurrent = True
    needs = frozenset({"chunks"})
    name = "a decayed sum"

    def __init__(self, config, layer_idx: int):
        super().__init__()
        self.layer_idx = layer_idx
        self.v_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.decay = LearnedFactors(config.hidden_size)
        self.o_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, hidden_states, state=None, *, chunks, need_state=False, **_):
        values = chunks.to_slots(self.v_proj(hidden_states))
        decay = 0.5 * self.decay(values.dtype)
        total = torch.zeros_like(values[:, 0]) if state is None else state.total
        sums = []
        for slot, value in enumerate(values.unbind(1)):
            if chunks.valid is None:
                total = decay * total + value
            else:
                is_token, is_first = chunks.valid[:, slot, None], chunks.position[:, slot, None] == 0
                total = torch.where(is_token, decay * torch.where(is_first, 0.0, total) + value, total)
            sums.append(total)
        output = self.o_proj(chunks.to_tokens(torch.stack(sums, dim=1)))
        return output, ToyState(total) if need_state else None

    @staticmethod
    def mixing_flops(config, sequence_length):
        return 2 * config.hidden_size

    @staticmethod
    def cache_bytes(config, tokens):
        return 4 * config.hidden_size


LAYERS = "layer_types=[toy,full_attention]"
TOY = [HOPE[0], f"{HOPE[1]},{LAYERS}"]


@pytest.fixture(autouse=True)
def registered():
    register("toy", ToyMixer)
    yield
    del MIXERS["toy"]


@pytest.fixture
def model(tiny_model):
    return tiny_model(torch.float64, layer_types=["toy", "full_attention"])


def ids(*shape):
    return torch.randint(62, shape, generator=torch.Generator().manual_seed(0))


def test_it_trains_and_the_trained_model_loads(run, tmp_path):
    status, rows = run("toy", model=TOY)
    losses = [row["train/loss"] for row in rows if "train/loss" in row]
    assert status == 0 and len(losses) == 8 and losses[-1] < losses[0]
    trained = HopeForCausalLM.from_pretrained(tmp_path / "toy")
    assert trained.config.layer_types == ["toy", "full_attention"]
    assert type(trained.model.layers[0].mixer) is ToyMixer


def test_packed_documents_are_read_as_if_each_were_alone(model):
    first, second = ids(1, 7), ids(1, 11)
    positions = torch.cat([torch.arange(7), torch.arange(11)])[None]
    packed = model(torch.cat([first, second], dim=1), position_ids=positions, use_cache=False).logits
    alone = torch.cat([model(text, use_cache=False).logits for text in (first, second)], dim=1)
    torch.testing.assert_close(packed, alone)


def test_it_is_planned(capsys, model):
    sizes = f"num_hidden_layers=2,hidden_size=64,{LAYERS}"
    words = ["--config_overrides", sizes, "--block_size", "64", "--per_device_train_batch_size", "2", "--json"]
    words += ["--simulate"]
    assert plan(words) == 0
    planned = json.loads(capsys.readouterr().out)
    config = HopeConfig.from_preset("tiny", num_hidden_layers=2, hidden_size=64, layer_types=["toy", "full_attention"])
    assert planned["parameters"] == HopeForCausalLM(config).num_parameters()
    (asked,) = [row for row in planned["settings"] if row["is_asked"]]
    assert asked["peak"] == pytest.approx(planned["simulation"]["peak"], rel=0.005)
