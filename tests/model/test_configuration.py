"""`HopeConfig`: named sizes, defaults for every width, refusals that name the field, and the way through JSON."""

import ast
import json
import re

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from mixers import RETAINING, SPARSE, WINDOW
from transformers import AutoConfig

from hope_hf import PRESETS, HopeConfig, HopeForCausalLM, LevelLearning
from hope_hf.optim import period_steps

SIZES = {"tiny": 8e6, "pilot": 160e6, "mid": 760e6, "target": 1.3e9}
SMALL = dict(vocab_size=100, hidden_size=64, num_hidden_layers=1)


def build_on_meta(config):
    with torch.device("meta"):
        return HopeForCausalLM(config)


def matrices_of(module):
    """The number of weights in matrices."""
    return sum(parameter.numel() for parameter in module.parameters() if parameter.ndim == 2)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_the_parameters_of_its_name(name):
    model = build_on_meta(HopeConfig.from_preset(name))
    assert model.num_parameters() == pytest.approx(SIZES[name.removesuffix("-hybrid")], rel=0.03)
    # every fourth layer
    kinds = model.config.layer_types
    assert kinds.count("sparse_attention") * 4 == (len(kinds) if name.endswith("-hybrid") else 0)


@pytest.mark.parametrize("kind, wider, squares", [("hope_memory", 2, 2), ("full_attention", 1, 8)])
def test_every_width_divisible_by_64_is_a_model(kind, wider, squares):
    for width in (64, 832):
        config = HopeConfig(vocab_size=100, hidden_size=width, num_hidden_layers=1, layer_types=[kind])
        (block,) = build_on_meta(config).model.layers
        # one level, rounded to the nearest 8 of its width, with three matrices
        assert matrices_of(block.continuum) == pytest.approx(squares * width**2, abs=4 * 3 * width)
        assert block.mixer.o_proj.weight.shape == (width, wider * width)


def test_levels_share_the_parameters_of_one_mlp_and_a_clock():
    for periods in ([10], [10] * 4):
        config = HopeConfig(vocab_size=100, hidden_size=768, num_hidden_layers=1, level_periods=periods)
        (block,) = build_on_meta(config).model.layers
        assert matrices_of(block.continuum) == pytest.approx(2 * 768**2, rel=0.02)
    assert HopeConfig(**SMALL, level_intermediate_sizes=[8, 16, 24]).level_periods == [1, 1, 1]


@pytest.mark.parametrize("config", [HopeConfig(**SMALL), *map(HopeConfig.from_preset, PRESETS)])
def test_no_level_waits_unless_periods_are_given(config):
    """One level a block, which every optimizer step updates, however few tokens it reads."""
    assert len(config.level_intermediate_sizes) == 1
    assert {period_steps(period, 1) for period in config.level_periods} == {1}


ATTENTION = dict(layer_types=["full_attention"])
TWO = dict(num_hidden_layers=2)
ERASES = dict(memory_erase_bias=[0.0, 0.0])
# what else is in the configuration, a field, and values that are refused by its name
REFUSED = [
    ({}, "memory_chunk_size", [0, "4", 2.5]),
    ({}, "vocab_size", [0]),
    ({}, "hidden_size", [0, 100]),
    ({"layer_types": ["hope_memory"]}, "num_hidden_layers", [0, 2]),
    ({}, "head_dim", [0, 48]),
    ({}, "num_memory_heads", [0]),
    ({}, "conv_kernel_size", [0]),
    ({}, "recompute_chunks", [-1]),
    ({}, "projection_memory_rate", [-0.1]),
    ({}, "memory_learning_rate_max", [-0.1, 2, float("nan")]),
    ({}, "memory_learning_rate_bias", [[1.0], 1.0]),
    ({}, "memory_erase_bias", [[1.0]]),
    ({}, "memory_depth", [2, 3]),
    ({}, "retention_bias", [[1.0], ["1", "8"]]),
    ({}, "memory_projections", [["q"], ["v", "k"], "kv"]),
    ({}, "memory_rule", ["gated"]),
    ({}, "layer_types", [["mamba"], ["hope_memory"] * 2, "full_attention", ["window_attention"]]),
    ({}, "hidden_act", ["swish1"]),
    ({}, "level_variant", ["nested"]),
    ({}, "level_periods", [[], [0, 1, 2], [4, 2, 8]]),
    ({}, "level_intermediate_sizes", [[], [8, 8, -8], "8,8,8"]),
    ({"level_intermediate_sizes": [8, 8, 8]}, "level_periods", [[1, 2]]),
    (ERASES, "memory_value_gate", [False]),
    (ERASES, "memory_projections", [["k"]]),
    (ERASES, "memory_rule", ["paper"]),
    (ATTENTION, "num_attention_heads", [0]),
    (ATTENTION, "num_key_value_heads", [0, 4]),
    (ATTENTION, "hidden_size", [100]),
    (WINDOW | TWO, "sliding_window", [None, 0]),
    (WINDOW | TWO, "attention_sinks", [-1]),
    (ATTENTION, "sliding_window", [6]),
    (RETAINING | TWO, "sliding_window", [None, 0]),
    (RETAINING | TWO, "retained_tokens", [[[3]], [[3], [3, 0]], [[3], [-1]], [[3], [1.5]], 3, [3, 3], [[], []], []]),
    (RETAINING | TWO, "retained_block_size", [0, 1, -1, 2.5]),
    (WINDOW | TWO, "retained_tokens", [[[3]], []]),
    (SPARSE | TWO, "sparse_window", [10]),
    (SPARSE | TWO, "sparse_compress_stride", [3]),
    (SPARSE | TWO, "sparse_top_k", [0]),
    (SPARSE | TWO, "sparse_block_size", [0]),
]


def test_a_bad_value_is_refused_by_the_name_of_its_field():
    for other, field, values in REFUSED:
        for value in values:
            # transformers wraps what a validator raises: the cause is the sentence
            with pytest.raises(StrictDataclassError) as refusal:
                HopeConfig(**SMALL | other | {field: value})
            assert field in str(refusal.value.__cause__), (field, value)


def test_heads_of_layers_that_are_not_there_may_be_anything():
    assert not HopeConfig(**SMALL, num_attention_heads=0).has_positions
    assert not HopeConfig(**SMALL, num_memory_heads=0, layer_types=["full_attention"]).has_memories
    hybrid = HopeConfig(**SMALL | {"num_hidden_layers": 2}, layer_types=["hope_memory", "full_attention"])
    assert hybrid.has_memories and hybrid.has_positions


def test_positions_end_where_a_layer_sees_the_whole_text():
    longest = {"hope_memory": None, "full_attention": 8192, "sparse_attention": 8192}
    longest |= dict.fromkeys(["window_attention", "retaining_attention"])
    for kind, expected in longest.items():
        window = 8 if kind in ("window_attention", "retaining_attention") else None
        config = HopeConfig(**SMALL, layer_types=[kind], sliding_window=window, max_position_embeddings=8192)
        assert config.longest_text == expected


def rewritten(folder, config, **fields):
    """A configuration's file with other fields, loaded."""
    config.save_pretrained(folder)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    return AutoConfig.from_pretrained(folder)


def test_options_of_the_papers_rule_are_read_where_they_are_as_they_are_now(tmp_path):
    """Checkpoints of before hold a field `paper_rule`: null, or options."""
    config = HopeConfig(**SMALL, memory_rule="paper")
    assert not hasattr(rewritten(tmp_path, config, paper_rule=None), "paper_rule")
    assert rewritten(tmp_path, config, paper_rule={"depth": 2, "erase": "output"}).memory_depth == 2
    for other in ({"erase": "both"}, {"depths": 2}, "literal"):
        with pytest.raises(ValueError, match="'paper_rule'"):
            rewritten(tmp_path, config, paper_rule=other)


def test_kinds_of_layers_are_saved_where_transformers_does_not_check_them(tmp_path):
    """It reads a tokenizer's folder without our class, and knows no kinds but its own in `layer_types`."""
    kinds = ["hope_memory", "full_attention"]
    config = HopeConfig(**SMALL | {"num_hidden_layers": 2}, layer_types=kinds)
    loaded = rewritten(tmp_path, config)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert "layer_types" not in saved and saved["mixer_types"] == kinds
    assert loaded.layer_types == loaded.to_dict()["layer_types"] == kinds and not hasattr(loaded, "mixer_types")
    # files of before
    assert rewritten(tmp_path, config, layer_types=kinds[::-1]).layer_types == kinds[::-1]


def test_a_field_of_another_version_is_refused_when_a_configuration_is_read(tmp_path):
    for field in ("memory_sigma", "mixer", "adaptive_k"):
        with pytest.raises(ValueError, match=f"'{field}'"):
            rewritten(tmp_path, HopeConfig(**SMALL), **{field: "silu", "some_tool": 1})


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="'tinny'.*tiny, pilot, mid, target"):
        HopeConfig.from_preset("tinny")
    with pytest.raises(ValueError, match="'memory_chunksize'.*'memory_chunk_size'"):
        HopeConfig.from_preset("tiny", memory_chunksize=16)
    with pytest.raises(ValueError, match="'zzzz'$"):
        HopeConfig.check_field("zzzz")


def test_a_preset_takes_overrides_and_stays_as_it_is():
    config = HopeConfig.from_preset("tiny", vocab_size=77, memory_chunk_size=5)
    assert (config.vocab_size, config.memory_chunk_size, config.hidden_size) == (77, 5, 256)
    config.level_periods.append(1)
    assert HopeConfig.from_preset("tiny").level_periods != config.level_periods


@pytest.mark.parametrize(
    "options",
    [
        dict(level_periods=[3, 70], level_intermediate_sizes=[16, 24], memory_projections=[]),
        dict(memory_learning_rate_bias=[-1.0, 2], retention_bias=[0, 3.5], memory_projections=["v"]),
        dict(layer_types=["full_attention"], rope_parameters={"rope_type": "default", "rope_theta": 5e5}),
        dict(eos_token_id=[3, 4], pad_token_id=0, tie_word_embeddings=True, memory_learning_rate_max=0),
    ],
    ids=str,
)
def test_json_gives_the_same_configuration_back(tmp_path, options):
    config = HopeConfig(**SMALL, **options)
    config.save_pretrained(tmp_path)
    for loaded in (HopeConfig.from_pretrained(tmp_path), AutoConfig.from_pretrained(tmp_path)):
        assert type(loaded) is HopeConfig
        assert loaded.to_dict() | {"_name_or_path": ""} == config.to_dict()
        assert {field: getattr(loaded, field) for field in options} == options


def test_fields_are_overridden_while_loading_and_checked_where_they_are_used(tmp_path):
    HopeConfig(**SMALL).save_pretrained(tmp_path)
    good = dict(num_hidden_layers=3, memory_chunk_size=7, layer_types=["hope_memory"] * 3)
    config = AutoConfig.from_pretrained(tmp_path, **good)
    assert {field: getattr(config, field) for field in good} == good
    for bad in (dict(memory_chunk_size=0), dict(level_periods=[1, 2]), dict(num_hidden_layers=2)):
        config = AutoConfig.from_pretrained(tmp_path, **bad)
        for use in (HopeForCausalLM, lambda config: config.save_pretrained(tmp_path)):
            with pytest.raises(StrictDataclassError, match=next(iter(bad))):
                use(config)


def test_the_docstring_has_every_default():
    """A default stands in the docstring and at the field; the form is that of transformers."""
    config = HopeConfig()
    documented = dict(re.findall(r" (\w+) \(`.*, defaults to `?(.+?)`?\):\n", HopeConfig.__doc__))
    assert len(documented) == HopeConfig.__doc__.count("defaults to") > 20
    for name, default in documented.items():
        assert getattr(config, name) == ast.literal_eval(default), name
    of_levels = HopeConfig.__doc__.split("`level_learning.LevelLearning`:")[1].split(":", 1)[0]
    defaults = dict(re.findall(r"`(matrices|rate|drift|gate|brake)` \(([^)]+)\)", of_levels))
    assert len(defaults) == 5
    for name, default in defaults.items():
        assert getattr(LevelLearning(), name) == ast.literal_eval(default), name
