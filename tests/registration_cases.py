"""HOPE is registered whatever a process does first: `python registration_cases.py FOLDER`.

Each case is a fork of a process that has imported neither the package nor torch, or of one that has imported torch and
transformers. FOLDER has `plain` (a saved HOPE), `trusted` (with its code), `pickled` (a config, a model, a cache).
"""

import importlib
import pickle
import sys
import threading
from pathlib import Path

from forked import apart

HEAVY = {"torch", "transformers", "numpy", "hope_hf.registered"}
FOLDER = Path(sys.argv[-1])


def loaded() -> set[str]:
    """The heavy modules that are imported."""
    return HEAVY & sys.modules.keys()


def load(name: str, **options):
    """The model of a folder, through the Auto class alone."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(FOLDER / name, **options)
    assert type(model).__module__ == "hope_hf.model.modeling_hope", type(model)
    return model


def the_package_alone_loads_nothing() -> None:
    import hope_hf

    assert loaded() == set()
    assert {"HopeModel", "frozen_memories", "__version__"} <= set(dir(hope_hf))
    try:
        hope_hf.HopeForSpeech  # noqa: B018
    except AttributeError as error:
        assert "HopeForSpeech" in str(error)
    else:
        raise AssertionError("an attribute that does not exist")
    assert loaded() == set()


def the_package_first() -> None:
    importlib.import_module("hope_hf")
    from transformers import AutoConfig

    assert "hope_hf.registered" not in sys.modules
    assert AutoConfig.for_model("llama").model_type == "llama" and "hope_hf.registered" not in sys.modules
    assert AutoConfig.for_model("hope").__class__._auto_class == "AutoConfig"
    load("plain")


def transformers_first() -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    assert "hope" not in CONFIG_MAPPING
    import hope_hf

    assert "hope" in CONFIG_MAPPING and "hope" in list(CONFIG_MAPPING.keys()) and "hope" in list(CONFIG_MAPPING)
    assert "hope_hf.registered" not in sys.modules
    assert CONFIG_MAPPING["hope"] is hope_hf.HopeConfig
    assert type(load("plain")) is hope_hf.HopeForCausalLM


def all_classes_are_listed() -> None:
    importlib.import_module("hope_hf")
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    for listed in (list(CONFIG_MAPPING.values()), [kind for _, kind in CONFIG_MAPPING.items()]):
        assert [kind.__name__ for kind in listed].count("HopeConfig") == 1 and None not in listed


def every_kind_of_head() -> None:
    hope_hf = importlib.import_module("hope_hf")
    import transformers

    config = transformers.AutoConfig.from_pretrained(FOLDER / "plain")
    for name in ("", "ForCausalLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering"):
        auto = getattr(transformers, f"AutoModel{name}")
        assert type(auto.from_config(config)).__name__ == (f"Hope{name}" if name else "HopeModel")
        assert auto._model_mapping[hope_hf.HopeConfig]._auto_class == auto.__name__
    pipe = transformers.pipeline("text-generation", model=str(FOLDER / "plain"))
    assert type(pipe.model) is hope_hf.HopeForCausalLM


def code_beside_the_package() -> None:
    import hope_hf  # noqa: F401

    for trust in (None, True):
        load("trusted", trust_remote_code=trust)


def a_pickle(name: str) -> None:
    """Without any import of the package, as in a worker that was spawned."""
    from transformers import AutoModelForCausalLM

    unpickled = pickle.loads((FOLDER / "pickled" / name).read_bytes())
    config = getattr(unpickled, "config", unpickled)
    if name != "cache":
        assert type(AutoModelForCausalLM.from_config(config)).__name__ == "HopeForCausalLM"
    load("plain")


def a_module(name: str) -> None:
    """Any module of the model brings the Auto classes and the fast paths."""
    importlib.import_module(name)
    from hope_hf.model.backends import FAST

    assert "token" in FAST and "scan_delta" in FAST
    load("plain")


def a_class_of_the_user() -> None:
    """It replaces the package's, as it did when that was registered at once."""
    hope_hf = importlib.import_module("hope_hf")
    from transformers import AutoConfig, LlamaConfig

    class Mine(LlamaConfig):
        model_type = "hope"

    AutoConfig.register("hope", Mine, exist_ok=True)
    assert hope_hf.HopeConfig.model_type == "hope" and type(AutoConfig.for_model("hope")) is Mine


def several_threads_at_once() -> None:
    """By a name, by a module as of a pickle, and by the model type: none waits for ever, and all find the model."""
    hope_hf = importlib.import_module("hope_hf")
    from transformers import AutoConfig

    found = []

    def by_type():
        found.append(AutoConfig.for_model("hope").model_type)

    def by_name():
        found.append(hope_hf.HopeConfig.model_type)

    def by_module():
        found.append(importlib.import_module("hope_hf.model.calls").HopeConfig.model_type)

    threads = [threading.Thread(target=one) for one in (by_type, by_module, by_name) * 3]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == ["hope"] * len(threads), found
    load("plain")


CLEAN = [(the_package_alone_loads_nothing,), (the_package_first,)]
WITH_TRANSFORMERS = [
    (transformers_first,),
    (all_classes_are_listed,),
    (every_kind_of_head,),
    (code_beside_the_package,),
    *((a_pickle, name) for name in ("config", "model", "cache")),
    *((a_module, f"hope_hf.{name}") for name in ("model.calls", "model.backends", "fast", "fast.norm", "registered")),
    (a_class_of_the_user,),
    (several_threads_at_once,),
]


if __name__ == "__main__":
    for case in CLEAN:
        apart(*case)
    # what the package's own modules take from them
    import torch.utils.checkpoint  # noqa: F401
    import transformers.models.llama.modeling_llama
    import transformers.pipelines  # noqa: F401

    assert "hope_hf" not in sys.modules
    for case in WITH_TRANSFORMERS:
        apart(*case)
    print(len(CLEAN) + len(WITH_TRANSFORMERS))
