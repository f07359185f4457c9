"""`--init sharded`: new values have the distribution of a whole model's; what it cannot draw or fit is a sentence.

tests/training/engines/test_engines.py trains with it (the runs "drawn", "loaded" and "moved").
"""

import pytest
import torch
from checkpoint_run import CONFIG
from training_runs import HOPE, LLAMA
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from hope_hf import HopeConfig
from hope_hf.common.run_arguments import Arguments
from hope_hf.training import initial
from hope_hf.training.engines.base import Engine, Slice
from hope_hf.training.initial import DrawnValues


def test_an_engine_that_cannot_names_the_launch_files_that_can(run, capsys, tmp_path):
    status, _ = run("a", "--init", "sharded")
    assert status == 2 and not (tmp_path / "a").exists()
    error = capsys.readouterr().err
    assert "--init sharded needs FSDP or ZeRO-3, and one process runs: launch with accelerate_configs/" in error


@pytest.mark.parametrize(("model", "free"), [(HOPE, 2**18), (LLAMA, 2**16)], ids=["hope", "llama"])
def test_a_model_beyond_the_memory_is_refused_before_it_is_built(run, capsys, tmp_path, monkeypatch, model, free):
    monkeypatch.setattr(initial, "free_memory", lambda device: free)
    monkeypatch.setattr("hope_hf.training.setup.build_model", None)
    status, _ = run("a", model=model)
    assert status == 2 and not (tmp_path / "a").exists()
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "1 process(es) on " in error and "are free; launch several with" in error


def everyone(monkeypatch, *rows) -> None:
    monkeypatch.setattr(initial, "gather_object", lambda own: list(rows))


def test_the_processes_of_each_machine_count(monkeypatch):
    engine = Engine()
    engine.fills_shards = True
    everyone(monkeypatch, ("a", 20), ("a", 20), ("b", 10))
    initial.check_host_memory(10, engine)
    everyone(monkeypatch, ("a", 20), ("a", 19), ("b", None))
    with pytest.raises(ValueError, match=r"2 process\(es\) on a build all of it: .*; give --init sharded\."):
        initial.check_host_memory(10, engine)


def test_weights_in_another_form_are_refused(tmp_path):
    """Mixtral's experts are separate in the files of the Hub."""
    config = AutoConfig.for_model("mixtral", **CONFIG | {"num_local_experts": 2, "num_key_value_heads": 2})
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    args = Arguments(model_name_or_path=str(tmp_path))
    with pytest.raises(ValueError, match=r"in a form that --init sharded does not read: save the model again"):
        initial.pretrained_values(args, config, initial.build_on_meta(args, config))


SMALL_LLAMA = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2}
SMALL_HOPE = {"hidden_size": 32, "num_hidden_layers": 3, "head_dim": 16, "level_intermediate_sizes": [16, 16]}
SMALL_HOPE |= {"level_periods": [64, 128]}
CONFIGS = {
    "hope": lambda: HopeConfig(vocab_size=90, **SMALL_HOPE),
    "hope of the paper": lambda: HopeConfig(vocab_size=90, memory_rule="paper", **SMALL_HOPE),
    "hope-attention": lambda: HopeConfig(vocab_size=90, layer_types=["full_attention"] * 3, **SMALL_HOPE),
    "llama": lambda: LlamaConfig(vocab_size=90, **SMALL_LLAMA),
    "llama, tied": lambda: LlamaConfig(vocab_size=90, tie_word_embeddings=True, **SMALL_LLAMA),
    "gpt2": lambda: AutoConfig.for_model("gpt2", vocab_size=90, n_embd=32, n_layer=3, n_head=2, n_positions=16),
}


def drawn(config, model_of=AutoModelForCausalLM.from_config) -> dict[str, torch.Tensor]:
    """Values by name that one process of a single shard gets."""
    with initial.init_empty_weights(include_buffers=False):
        model = model_of(config)
    model.tie_weights()
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    slices = []
    for own in names.values():
        shape = model.get_parameter(own[0]).shape
        values = torch.full((shape.numel(),), torch.nan)
        slices.append(Slice(tuple(own), shape, 0, {"weight": values}, is_copy=False))
    DrawnValues(model, seed=1).fill(slices)
    assert all(parameter.is_meta for parameter in model.parameters())
    return {part.names[0]: part.tensors["weight"].view(part.shape) for part in slices}


@pytest.mark.parametrize("name", CONFIGS)
def test_values_have_the_distribution_of_the_ordinary_way(name):
    values = drawn(CONFIGS[name]())
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(CONFIGS[name]())
    assert values.keys() == dict(model.named_parameters()).keys()
    for parameter, expected in model.named_parameters():
        own, count = values[parameter], expected.numel()
        std = float(expected.std()) if count > 1 else 0.0
        if count < 30 or len(expected.unique()) < count / 2:
            # Constants: norms, gates, rows of zeros. A few drawn values have no distribution to speak of.
            assert torch.equal(own, expected) or std > 0 and own.isfinite().all(), parameter
            continue
        # Five standard errors of two samples.
        bound = 5 * (2 / count) ** 0.5
        assert abs(float(own.std()) - std) < bound * std, parameter
        assert abs(float(own.mean() - expected.mean())) < bound * std, parameter


def test_blocks_are_drawn_one_after_the_other_and_queries_begin_as_keys(monkeypatch):
    held = []
    monkeypatch.setattr(DrawnValues, "_take", watched(DrawnValues._take, held))
    values = drawn(CONFIGS["hope"]())
    mixer = "model.layers.1.mixer."
    key_map, query_map = values[f"{mixer}k_proj.weight"], values[f"{mixer}q_proj.weight"]
    keys, queries = values[f"{mixer}k_conv1d.weight"], values[f"{mixer}q_conv1d.weight"]
    assert key_map.std() > 0 and torch.equal(key_map, query_map)
    assert keys.std() > 0 and torch.equal(keys[..., :-1], queries[..., 1:])
    assert not torch.equal(key_map, values["model.layers.0.mixer.k_proj.weight"])
    in_a_block = sum(values[name].numel() for name in values if ".layers.1." in name)
    assert max(held) == in_a_block


def watched(take, held: list[int]):
    """`take`, which notes how many parameters are in memory at every call."""

    def noted(self, name, values):
        held.append(sum(parameter.numel() for parameter in self._model.parameters() if not parameter.is_meta))
        take(self, name, values)

    return noted


class Unset(LlamaForCausalLM):
    """Its head keeps the values of its construction."""

    def _init_weights(self, module):
        if module is not self.lm_head:
            super()._init_weights(module)


def test_values_that_no_initialisation_sets_are_refused():
    with pytest.raises(ValueError, match=r"--init sharded cannot draw lm_head.weight, .*: leave --init out"):
        drawn(CONFIGS["llama"](), Unset)
