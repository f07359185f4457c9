"""A model that FSDP2 has sharded is saved as if it had not been: weights, code and the names of its classes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from mixers import MIXED
from transformers import AutoModelForCausalLM

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("warm_python")]
SCRIPT = Path(__file__).with_name("fsdp_save.py")


def test_a_sharded_model_is_saved_like_a_whole_one(tiny_model, tmp_path):
    model = tiny_model(**MIXED)
    whole, sharded = tmp_path / "whole", tmp_path / "sharded"
    model.save_pretrained(whole)
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone"]
    subprocess.run([*launch, str(SCRIPT), str(whole), str(sharded)], check=True, timeout=300)
    assert {path.name for path in sharded.iterdir()} == {path.name for path in whole.iterdir()}
    for path in whole.iterdir():
        if path.suffix == ".py":
            assert (sharded / path.name).read_bytes() == path.read_bytes()
    first, second = (json.loads((folder / "config.json").read_text()) for folder in (whole, sharded))
    assert first == second
    loaded = AutoModelForCausalLM.from_pretrained(sharded)
    ids = torch.randint(64, (2, 19), generator=torch.Generator().manual_seed(1))
    assert torch.equal(loaded(ids).logits, model(ids).logits)
