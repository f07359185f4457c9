"""Files of an earlier version load and go on: a run's checkpoint, one in parts of two processes, and a cache.

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

EXPECTED = json.loads((make.HERE / "expected.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", ["plain", "sharded"])
def test_an_old_checkpoint_resumes(name, tmp_path, monkeypatch):
    make.write_text(tmp_path)
    shutil.copytree(make.HERE / name, tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    main(make.ONE_PROCESS)
    losses = make.losses(tmp_path / "run")
    assert len(losses) == 3
    assert losses == pytest.approx(EXPECTED[name], rel=1e-6)


def test_an_old_cache_is_read_on():
    model = AutoModelForCausalLM.from_pretrained(make.HERE / "plain/checkpoint-2").eval()
    cache = HopeCache.from_pretrained(make.HERE / "cache", model)
    assert cache.get_seq_length() == 100
    logits = make.logits_after(model, cache)[0, -1]
    assert torch.allclose(logits, torch.tensor(EXPECTED["cache"]), rtol=1e-5, atol=1e-6)
