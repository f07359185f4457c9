"""The public names of the package. Importing them registers HOPE with the Auto classes, and fast paths with the model.

It imports torch and the models, which takes seconds: `import hope_hf` leaves it to the first use (`registration.py`).
"""
# ruff: noqa: F401  the package's public names

import transformers

import hope_hf.fast  # registers its paths

from .frozen import frozen_memories
from .model.cache_hope import CACHE_NAME, HopeCache
from .model.configuration_hope import PRESETS, HopeConfig
from .model.level_learning import LevelLearning
from .model.level_reading import learning_rate_search
from .model.modeling_hope import (
    AUTO_CLASSES,
    HopeForCausalLM,
    HopeForQuestionAnswering,
    HopeForSequenceClassification,
    HopeForTokenClassification,
    HopeModel,
    HopePreTrainedModel,
)
from .model.recall import Passage, join_passages

transformers.AutoConfig.register("hope", HopeConfig, exist_ok=True)
HopeConfig.register_for_auto_class()
for auto, model_class in AUTO_CLASSES.items():
    getattr(transformers, auto).register(HopeConfig, model_class, exist_ok=True)
    model_class.register_for_auto_class(auto)
del auto, model_class
