"""Files of earlier versions load and go on: a run's checkpoint, one in parts of two processes, and caches.

`frozen/make.py` wrote them, and with that version's code what they must give.
"""

import json
import shutil

import pytest
import torch
from frozen import make
from transformers import AutoModelForCausalLM

from hope_hf import HopeCache
from hope_hf.training import main

VERSIONS = ["first", "second"]
EXPECTED = {name: json.loads((make.HERE / name / "expected.json").read_text(encoding="utf-8")) for name in VERSIONS}


@pytest.mark.parametrize("name", ["plain", "sharded"])
def test_an_old_checkpoint_resumes(name, tmp_path, monkeypatch):
    make.write_text(tmp_path)
    shutil.copytree(make.HERE / "second" / name, tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    main(make.ONE_PROCESS)
    losses = make.losses(tmp_path / "run")
    assert len(losses) == 3
    assert losses == pytest.approx(EXPECTED["second"][name], rel=1e-6)


@pytest.mark.parametrize("version, name", [("first", "cache"), ("second", "cache"), ("second", "learned")])
def test_an_old_cache_is_read_on(version, name):
    model = AutoModelForCausalLM.from_pretrained(make.HERE / version / "plain/checkpoint-2").eval()
    model.config.level_learning = make.LEARNS if name == "learned" else None
    cache = HopeCache.from_pretrained(make.HERE / version / name, model)
    assert cache.get_seq_length() == 100
    logits = torch.tensor(make.logits_after(model, cache))
    torch.testing.assert_close(logits, torch.tensor(EXPECTED[version][name]), rtol=1e-5, atol=1e-6)
