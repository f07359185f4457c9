"""`HopeConfig`: named sizes, defaults for every width, refusals in one sentence, and the way through JSON."""

import json

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig

from hope_hf import PRESETS, HopeConfig, HopeForCausalLM

SIZES = {"tiny": 8e6, "pilot": 160e6, "mid": 760e6, "target": 1.3e9}
SMALL = dict(vocab_size=100, hidden_size=64, num_hidden_layers=1)


def build_on_meta(config):
    with torch.device("meta"):
        return HopeForCausalLM(config)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_the_parameters_of_its_name(name):
    model = build_on_meta(HopeConfig.from_preset(name))
    assert model.num_parameters() == pytest.approx(SIZES[name], rel=0.03)


def test_tiny_is_counted_at_the_vocabulary_of_the_demo():
    assert HopeConfig.from_preset("tiny").vocab_size == 4096


@pytest.mark.parametrize("mixer, wider, squares", [("self_modifying", 2, 4), ("attention", 1, 8)])
@pytest.mark.parametrize("width", range(64, 1537, 64))
def test_every_width_divisible_by_64_is_a_model(width, mixer, wider, squares):
    config = HopeConfig(vocab_size=100, hidden_size=width, num_hidden_layers=2, mixer=mixer)
    assert len(config.level_intermediate_sizes) == len(config.level_periods)
    model = build_on_meta(config)
    for block in model.model.layers:
        matrices = sum(p.numel() for p in block.continuum.parameters() if p.ndim == 2)
        # Each of three levels is rounded to the nearest 8 of its width, each with three matrices.
        assert matrices == pytest.approx(squares * width**2, abs=3 * 4 * 3 * width)
    assert config.num_attention_heads * config.head_dim == wider * width
    assert model.model.layers[0].mixer.o_proj.weight.shape == (width, wider * width)


@pytest.mark.parametrize("mixer", ["self_modifying", "attention"])
def test_the_mixer_may_have_another_width_than_the_stream(mixer):
    model = HopeForCausalLM(HopeConfig(vocab_size=100, hidden_size=36, num_hidden_layers=1, mixer=mixer,
                                       num_attention_heads=2, head_dim=8))  # fmt: skip
    assert model.model.layers[0].mixer.o_proj.weight.shape == (36, 16)
    assert model(torch.tensor([[1, 2, 3]])).logits.shape == (1, 3, 100)


def test_three_arguments_make_a_model_that_runs():
    model = HopeForCausalLM(HopeConfig(**SMALL))
    assert model(torch.tensor([[1, 2, 3]])).logits.shape == (1, 3, 100)


@pytest.mark.parametrize("num_levels", [1, 2, 4])
def test_levels_share_the_parameters_of_one_mlp(num_levels):
    config = HopeConfig(vocab_size=100, hidden_size=768, num_hidden_layers=1, level_periods=[10] * num_levels)
    continuum = build_on_meta(config).model.layers[0].continuum
    assert sum(p.numel() for p in continuum.parameters() if p.ndim == 2) == pytest.approx(4 * 768**2, rel=0.02)


REFUSED = {
    "memory_chunk_size": [0, -3, "4", 2.5],
    "projection_chunk_size": [0, -1],
    "vocab_size": [0],
    "hidden_size": [0, -64, 100],
    "num_hidden_layers": [0],
    "head_dim": [0, 48],
    "num_attention_heads": [0, -1],
    "num_key_value_heads": [0, 4],
    "memory_depth": [0, 3],
    "memory_expansion": [0],
    "projection_memory_expansion": [0],
    "conv_kernel_size": [0],
    "recompute_chunks": [-1],
    "inner_layer_rate": [-0.1],
    "projection_memory_rate": [-0.1],
    "memory_learning_rate_max": [-0.1, 2, float("nan")],
    "memory_error_clip": [0, -1.0],
    "memory_gradient_factor": [3],
    "memory_read_mode": ["before"],
    "memory_erase": ["all"],
    "memory_hidden_norm": ["rms"],
    "memory_decay_to": ["start"],
    "gate_mode": ["linear"],
    "mixer": ["mamba"],
    "adaptive_k": [0],
    "adaptive_v": [0],
    "adaptive_q": [1],
    "level_variant": ["nested", "parallel"],
    "level_periods": [[], [0, 1, 2], [4, 2, 8], [1.5, 2, 3], 4],
    "level_intermediate_sizes": [[8], [8, 8, 8, 8], [0, 8, 8], [8, 8, -8], "8,8,8", [[8], [8], [8]]],
}


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, bad in REFUSED.items() for value in bad])
def test_a_bad_value_is_refused_in_a_sentence_with_the_name_of_its_field(field, value):
    # transformers wraps what a validator raises: the cause is the sentence
    with pytest.raises(StrictDataclassError) as refusal:
        HopeConfig(**{**SMALL, field: value})
    sentence = str(refusal.value.__cause__)
    assert isinstance(refusal.value.__cause__, (ValueError, TypeError))
    assert field in sentence and "\n" not in sentence


def test_large_steps_need_a_clip():
    with pytest.raises(StrictDataclassError, match="memory_learning_rate_max.*memory_error_clip"):
        HopeConfig(**SMALL, memory_learning_rate_max=1.5, memory_error_clip=None)
    assert HopeConfig(**SMALL, memory_learning_rate_max=1.99).memory_learning_rate_max == 1.99


def test_one_projection_must_be_a_memory():
    with pytest.raises(StrictDataclassError, match="adaptive_k.*adaptive_v.*projection_memory_rate"):
        HopeConfig(**SMALL, adaptive_k=False, adaptive_v=False)


def test_lists_of_levels_must_be_of_one_length():
    with pytest.raises(StrictDataclassError, match="level_periods.*level_intermediate_sizes.*same length"):
        HopeConfig(**SMALL, level_periods=[1, 2], level_intermediate_sizes=[8, 8, 8])


def test_a_field_of_another_version_is_refused_when_a_configuration_is_read(tmp_path):
    HopeConfig(**SMALL).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"memory_sigma": "silu", "some_tool": 1}))
    with pytest.raises(ValueError, match="'memory_sigma'.*another version wrote it"):
        AutoConfig.from_pretrained(tmp_path)


def test_nested_levels_are_refused_with_what_to_use_instead():
    with pytest.raises(StrictDataclassError, match="nested.*use 'sequential' or 'independent'"):
        HopeConfig(**SMALL, level_variant="nested")


def test_an_unknown_preset_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="'tinny'.*tiny, pilot, mid, target"):
        HopeConfig.from_preset("tinny")


def test_a_misspelled_field_is_refused_with_the_nearest():
    with pytest.raises(ValueError, match="'memory_chunksize'; did you mean 'memory_chunk_size'"):
        HopeConfig.from_preset("tiny", memory_chunksize=16)
    with pytest.raises(ValueError, match="no field 'zzzz'$"):
        HopeConfig.check_field("zzzz")


def test_a_preset_takes_overrides_and_stays_as_it_is():
    before = json.dumps(PRESETS)
    config = HopeConfig.from_preset("tiny", vocab_size=77, memory_chunk_size=5)
    config.level_periods.append(1)
    assert (config.vocab_size, config.memory_chunk_size, config.hidden_size) == (77, 5, 256)
    assert json.dumps(PRESETS) == before


@pytest.mark.parametrize(
    "options",
    [
        dict(level_periods=[3, 70], level_intermediate_sizes=[16, 24], memory_error_clip=None),
        dict(mixer="attention", rope_parameters={"rope_type": "default", "rope_theta": 5e5}),
        dict(eos_token_id=[3, 4], pad_token_id=0, tie_word_embeddings=True, memory_learning_rate_max=0),
    ],
    ids=str,
)
def test_json_gives_the_same_configuration_back(tmp_path, options):
    config = HopeConfig(**SMALL, **options)
    config.save_pretrained(tmp_path)
    for loaded in (HopeConfig.from_pretrained(tmp_path), AutoConfig.from_pretrained(tmp_path)):
        assert type(loaded) is HopeConfig
        ours, theirs = ({**each.to_dict(), "_name_or_path": ""} for each in (config, loaded))
        assert theirs == ours
        assert {field: getattr(loaded, field) for field in options} == options


@pytest.mark.parametrize("mixer", ["self_modifying", "attention"])
def test_fields_can_be_overridden_while_loading(tmp_path, mixer):
    HopeConfig(**SMALL, mixer=mixer).save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path, num_hidden_layers=3, memory_chunk_size=7)
    assert (config.num_hidden_layers, config.memory_chunk_size, len(config.layer_types)) == (3, 7, 3)
    config.save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).num_hidden_layers == 3


@pytest.mark.parametrize("override", [dict(memory_chunk_size=0), dict(level_periods=[1, 2])], ids=str)
def test_a_bad_value_set_later_is_neither_built_nor_saved(tmp_path, override):
    HopeConfig(**SMALL).save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path, **override)
    for use in (HopeForCausalLM, lambda config: config.save_pretrained(tmp_path)):
        with pytest.raises(StrictDataclassError, match=next(iter(override))):
            use(config)


def test_layer_types_may_be_set_to_what_they_are_only():
    config = HopeConfig(**SMALL)
    config.num_hidden_layers = 2
    config.layer_types = ["hope_memory"] * 2
    with pytest.raises(ValueError, match="`layer_types` follows from `mixer` and `num_hidden_layers`: set these"):
        config.layer_types = ["full_attention"] * 2
    assert config.layer_types == ["hope_memory"] * 2
