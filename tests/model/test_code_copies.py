"""Models of several copies of the code in one process, as `trust_remote_code` makes them."""

import importlib
import shutil
import sys
from pathlib import Path

import pytest
import torch
from transformers import StaticCache
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING, STATIC_LAYER_TYPE_MAPPING

import hope_hf
from hope_hf import HopeCache
from hope_hf.fast import one_token
from hope_hf.model import backends


@pytest.fixture(params=["package first", "copy first"])
def code_copy(request, tmp_path, monkeypatch):
    """The module `modeling_hope` of another copy, whose classes transformers knows before or after the package's."""
    if request.param == "copy first":
        monkeypatch.delitem(DYNAMIC_LAYER_TYPE_MAPPING, "hope_memory")
        monkeypatch.delitem(STATIC_LAYER_TYPE_MAPPING, "hope_memory")
    shutil.copytree(Path(hope_hf.__file__).parent / "model", tmp_path / "code_copy")
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("code_copy.modeling_hope")
    for name in [name for name in sys.modules if name.split(".")[0] in ("code_copy", "configuration_copy")]:
        del sys.modules[name]


def test_models_of_two_copies_of_the_code_work_side_by_side(tiny_model, code_copy, tmp_path):
    ours = tiny_model(torch.float64)
    ours.save_pretrained(tmp_path)
    theirs = code_copy.HopeForCausalLM.from_pretrained(tmp_path)
    ids = torch.randint(64, (2, 14), generator=torch.Generator().manual_seed(1))
    options = dict(max_new_tokens=3, do_sample=False, pad_token_id=0)
    expected = ours.generate(ids, use_cache=False, **options)
    makers = [
        lambda model: HopeCache(model.config),
        lambda model: importlib.import_module("code_copy.cache_hope").HopeCache(model.config),
        lambda model: StaticCache(model.config, max_cache_len=30),
    ]
    for make in makers:
        for reader, writer in ((ours, theirs), (theirs, ours)):
            cache = make(reader)
            with torch.no_grad():
                reader(ids[:, :9], cache=cache)
            assert torch.equal(writer.generate(ids, cache=cache, **options), expected)
    with hope_hf.frozen_memories(theirs):
        frozen, live = theirs(ids).logits, ours(ids).logits
    assert torch.equal(frozen, ours(ids, freeze_memories=True).logits) and not torch.equal(frozen, live)


def test_a_copy_takes_fast_paths_where_its_code_is_the_packages(tiny_model, code_copy, tmp_path):
    copied = importlib.import_module("code_copy.backends")
    assert copied.FAST is not backends.FAST and copied.FAST == backends.FAST
    theirs = code_copy.HopeForCausalLM(code_copy.HopeConfig(**tiny_model().config.to_diff_dict()))
    theirs.generate(torch.ones(1, 5, dtype=torch.long), max_new_tokens=3, do_sample=False)
    assert one_token._WEIGHTS[theirs.model.layers[0]].memory is not None
    with open(tmp_path / "code_copy" / "memory_delta.py", "a") as file:
        file.write("# changed\n")
    copied.FAST.clear()
    copied.borrow_fast_paths()
    assert copied.FAST == {}


def test_heads_take_a_configuration_of_another_copy(tiny_config, code_copy, tmp_path):
    """From a local folder, `trust_remote_code` loads configuration and model as two copies."""
    shutil.copytree(Path(hope_hf.__file__).parent / "model", tmp_path / "configuration_copy")
    config_class = importlib.import_module("configuration_copy.configuration_hope").HopeConfig
    config = config_class.from_dict(tiny_config().to_dict())
    for head in ("SequenceClassification", "TokenClassification", "QuestionAnswering"):
        model = getattr(code_copy, f"HopeFor{head}")(config)
        assert type(model.model) is code_copy.HopeModel


def test_a_file_of_either_copy_is_read_by_the_other(tiny_model, code_copy, tmp_path):
    model = tiny_model()
    ids = torch.randint(64, (2, 9), generator=torch.Generator().manual_seed(1))
    kinds = HopeCache, importlib.import_module("code_copy.cache_hope").HopeCache
    for writer in kinds:
        cache = writer(model.config)
        with torch.no_grad():
            model(ids, cache=cache)
        cache.save_pretrained(tmp_path, model)
        for reader in kinds:
            loaded = reader.from_pretrained(tmp_path, model)
            torch.testing.assert_close(loaded.state_tensors(), cache.state_tensors(), rtol=0, atol=0)
