"""PEFT's tests of decoder models on the model in the folder `tiny`; collected by `make peft-suite` only.

The tests are part of PEFT's sources and not of its package: PEFT_SUITE names a folder with its `tests/` for the
installed release (see CONTRIBUTING.md), which comes first in PYTHONPATH.
"""

import json
import sys
from pathlib import Path
from types import ModuleType

# Imported by the suite for models of another kind.
sys.modules["diffusers"] = ModuleType("diffusers")
sys.modules["diffusers"].StableDiffusionPipeline = type("StableDiffusionPipeline", (), {})

import tests.test_decoder_models as suite  # noqa: E402
from tests.test_decoder_models import TestDecoderModels  # noqa: E402, F401

import hope_hf  # noqa: E402, F401  makes transformers' Auto classes know HOPE

# PEFT has targets only for models of its own list: ours are the maps into the mixer, as in Llama.
TARGETS = {"hope_memory": ["in_proj", "q_proj"], "full_attention": ["q_proj", "v_proj"], "mamba2": ["in_proj"]}

# Changed in place: the marks of the tests hold these list objects.
suite.PEFT_DECODER_MODELS_TO_TEST[:] = suite.SMALL_GRID_MODELS[:] = ["tiny"]
config = json.loads(Path("tiny/config.json").read_text())
targets = TARGETS[config["layer_types"][0] if config["model_type"] == "hope" else config["model_type"]]
for config_class, options in suite.ALL_CONFIGS:
    if "target_modules" in config_class.__dataclass_fields__ and config_class is not suite.ShadowConfig:
        options["target_modules"] = targets
    if "feedforward_modules" in options:
        options["feedforward_modules"] = []
