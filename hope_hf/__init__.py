"""HOPE (Nested Learning) as a Hugging Face model: importing this package registers it with the Auto classes."""

# Imported first, since the other imports take seconds.
from .interrupt import while_importing as while_importing

# isort: split
import transformers

from .fast import PATHS as _fast_paths  # noqa: F401  importing registers them
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

__version__ = "0.1.0"

__all__ = [
    "CACHE_NAME",
    "PRESETS",
    "HopeCache",
    "HopeConfig",
    "HopeForCausalLM",
    "HopeForQuestionAnswering",
    "HopeForSequenceClassification",
    "HopeForTokenClassification",
    "HopeModel",
    "HopePreTrainedModel",
    "LevelLearning",
    "Passage",
    "frozen_memories",
    "join_passages",
    "learning_rate_search",
]
