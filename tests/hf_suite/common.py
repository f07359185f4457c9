"""transformers' common test suite on HOPE, Hope-Attention and hybrids; collected by `make hf-suite` only.

The suite is part of transformers' sources and not of its package: HF_SUITE names a folder with its `tests/` for the
installed release (see CONTRIBUTING.md), which comes first in PYTHONPATH.
"""

import os
import sys
import unittest
from types import SimpleNamespace
from unittest.mock import patch

import torch
import transformers.utils

# The suite would import transformers from its sources: give it the installed package.
transformers.utils.direct_transformers_import = lambda *args, **kwargs: sys.modules["transformers"]

import tests.test_fsdp_mixin as fsdp_mixin  # noqa: E402
import tests.test_tensor_parallel_mixin as tensor_parallel_mixin  # noqa: E402
from tests.causal_lm_tester import CausalLMModelTest, CausalLMModelTester  # noqa: E402
from tests.test_configuration_common import ConfigTester  # noqa: E402
from transformers.models.auto import modeling_auto  # noqa: E402

import hope_hf  # noqa: E402
from hope_hf import HopeCache, HopeConfig, HopeForCausalLM, HopeModel  # noqa: E402
from hope_hf.model.cache_parts import named_tensors  # noqa: E402

# The suite looks up a model's classes by name.
for mapping, name in {
    "MODEL_MAPPING_NAMES": "HopeModel",
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES": "HopeForCausalLM",
    "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES": "HopeForSequenceClassification",
    "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES": "HopeForTokenClassification",
    "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES": "HopeForQuestionAnswering",
}.items():
    getattr(modeling_auto, mapping)["hope"] = name
# Two processes on this machine; by default for a few models of transformers only.
tensor_parallel_mixin.TP_DISTRIBUTED_TEST_MODEL_TYPES = {"hope"}
if os.environ.get("RUN_SLOW"):
    fsdp_mixin.FSDP_DISTRIBUTED_TEST_MODEL_TYPES = {"hope"}


class Tester(CausalLMModelTester):
    """Small models of two layers."""

    config_class = HopeConfig
    base_model_class = HopeModel
    causal_lm_class = HopeForCausalLM
    sequence_classification_class = hope_hf.HopeForSequenceClassification
    token_classification_class = hope_hf.HopeForTokenClassification
    question_answering_class = hope_hf.HopeForQuestionAnswering
    layer_types = ("hope_memory", "hope_memory")
    more = {}

    def __init__(self, parent, **changes):
        sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8}
        sizes |= {"num_memory_heads": 4, "layer_types": list(self.layer_types)} | self.more
        super().__init__(parent, **{**sizes, **changes})

    @property
    def config_args(self):
        """Names of the configuration's fields; the suite reads them from a signature that a dataclass lacks."""
        return list(HopeConfig.__dataclass_fields__)


class Suite(CausalLMModelTest):
    """Tests of both kinds of layers."""

    # By default for files with a licence header of 2023 or later only.
    test_can_init_all_missing_weights_before_2023 = True

    def setUp(self):
        super().setUp()
        self.config_tester = ConfigTester(
            self,
            config_class=HopeConfig,
            common_properties=["hidden_size", "num_hidden_layers", "num_attention_heads"],
            hidden_size=36,
            num_attention_heads=4,
            num_memory_heads=4,
        )


class WithMemories(Suite):
    """Tests of models with layers of memories, whose states are no keys and values."""

    def _check_caches_are_equal(self, cache1, cache2):
        first, second = HopeCache.state_tensors(cache1), HopeCache.state_tensors(cache2)
        assert first.keys() == second.keys()
        for name in first:
            torch.testing.assert_close(first[name], second[name], rtol=1e-4, atol=1e-5, msg=name)

    def test_recurrent_layers_mask_padding_on_continued_forward(self):
        # The suite runs this only for layers with transformers' names: it gets one, the model keeps its own.
        own = HopeConfig.get_text_config
        told = SimpleNamespace(layer_types=["linear_attention"])
        with patch.object(HopeConfig, "get_text_config", lambda self, **which: own(self, **which) if which else told):
            super().test_recurrent_layers_mask_padding_on_continued_forward()


class HopeMemory(WithMemories, unittest.TestCase):
    """HOPE: self-modifying memories. The cache has a constant size and no keys and values to check."""

    model_tester_class = Tester
    has_attentions = False

    def setUp(self):
        super().setUp()
        if "rope_scaling" in self._testMethodName:
            self.skipTest("memories know no positions")

    def _check_past_key_values_for_generate(self, batch_size, past_key_values, seq_length, config):
        assert len(past_key_values) == config.num_hidden_layers
        assert seq_length is None or past_key_values.get_seq_length() == seq_length
        for layer in past_key_values.layers:
            assert {len(tensor) for tensor in named_tensors(layer.state).values()} == {batch_size}

    def test_left_padding_compatibility(self):
        # The suite runs this only for models with attentions, but a recurrent one must pass it too.
        self.has_attentions = True
        super().test_left_padding_compatibility()


class AttentionTester(Tester):
    """Small models of Hope-Attention."""

    layer_types = ("full_attention", "full_attention")


class HopeAttention(Suite, unittest.TestCase):
    """Hope-Attention: softmax attention, then HOPE's levels."""

    model_tester_class = AttentionTester


class HybridTester(Tester):
    """Small models with a layer of each kind."""

    layer_types = ("hope_memory", "full_attention")


class HopeHybrid(WithMemories, unittest.TestCase):
    """Memories, then softmax attention."""

    model_tester_class = HybridTester

    def _check_past_key_values_for_generate(self, batch_size, past_key_values, seq_length, config):
        memory, attention = past_key_values.layers
        assert {len(tensor) for tensor in named_tensors(memory.state).values()} == {batch_size}
        shape = (batch_size, config.num_key_value_heads, seq_length, config.head_dim)
        assert attention.keys.shape == attention.values.shape == shape

    def test_attention_outputs(self):
        # The suite expects attentions of every layer, and one of the two has them.
        tester = self.model_tester
        prepare = tester.prepare_config_and_inputs_for_common

        def prepare_and_count():
            prepared = prepare()
            tester.num_hidden_layers = 1
            return prepared

        with patch.object(tester, "prepare_config_and_inputs_for_common", prepare_and_count):
            super().test_attention_outputs()


class SparseHybridTester(Tester):
    """Small models with memories and sparse attention, in blocks smaller than the texts."""

    layer_types = ("hope_memory", "sparse_attention")
    more = {"sparse_block_size": 4, "sparse_compress_stride": 2, "sparse_top_k": 2, "sparse_window": 4}


class HopeSparseHybrid(WithMemories, unittest.TestCase):
    """Memories, then sparse attention, which returns no attentions."""

    model_tester_class = SparseHybridTester
    has_attentions = False

    def _check_past_key_values_for_generate(self, batch_size, past_key_values, seq_length, config):
        memory, sparse = past_key_values.layers
        rows = {len(tensor) for layer in (memory, sparse) for tensor in named_tensors(layer.state).values()}
        assert rows == {batch_size} and (seq_length is None or past_key_values.get_seq_length() == seq_length)
        keys, values = sparse.state.slot_keys, sparse.state.slot_values
        # whole blocks, without padding
        assert keys.shape == values.shape and not keys.shape[2] % config.sparse_block_size
        assert (keys.shape[1], keys.shape[3]) == (config.num_key_value_heads, config.head_dim)
