"""HOPE (Nested Learning) as a Hugging Face model: importing this package registers it with the Auto classes.

`import hope_hf` itself loads neither torch nor transformers, so that programs read their flags at once. What the names
below stand for is imported when one is first used, or when transformers looks for the model (`registration.py`).
"""

from typing import TYPE_CHECKING

# Imported first: a program's Ctrl-C is then one sentence, also while the other imports take seconds.
from .interrupt import while_importing as while_importing

# isort: split
from .lazy import late_names
from .registration import register_on_use

if TYPE_CHECKING:
    from .registered import (
        CACHE_NAME,
        PRESETS,
        HopeCache,
        HopeConfig,
        HopeForCausalLM,
        HopeForQuestionAnswering,
        HopeForSequenceClassification,
        HopeForTokenClassification,
        HopeModel,
        HopePreTrainedModel,
        LevelLearning,
        Passage,
        frozen_memories,
        join_passages,
        learning_rate_search,
    )

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

__getattr__, __dir__ = late_names(__name__, {"registered": tuple(__all__)})
register_on_use()
