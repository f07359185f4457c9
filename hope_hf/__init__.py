"""HOPE (Nested Learning) as a Hugging Face model: importing this package registers it with the Auto classes."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from .model.cache_hope import HopeCache
from .model.configuration_hope import PRESETS, HopeConfig
from .model.modeling_hope import HopeForCausalLM, HopeModel, HopePreTrainedModel

AutoConfig.register("hope", HopeConfig, exist_ok=True)
AutoModel.register(HopeConfig, HopeModel, exist_ok=True)
AutoModelForCausalLM.register(HopeConfig, HopeForCausalLM, exist_ok=True)
HopeConfig.register_for_auto_class()
HopeModel.register_for_auto_class("AutoModel")
HopeForCausalLM.register_for_auto_class("AutoModelForCausalLM")

__all__ = ["PRESETS", "HopeCache", "HopeConfig", "HopeForCausalLM", "HopeModel", "HopePreTrainedModel"]
