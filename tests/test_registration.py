"""`import hope_hf` alone registers HOPE with transformers, and loads neither torch nor transformers."""

import ast
import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import registration_cases
import torch

import hope_hf
from hope_hf import HopeCache


@pytest.mark.processes
def test_hope_is_registered_whatever_a_process_does_first(tiny_model, word_tokenizer, tmp_path):
    model = tiny_model()
    cache = HopeCache(model.config)
    model(torch.arange(8)[None], cache=cache)
    model.save_pretrained(tmp_path / "trusted")
    (tmp_path / "plain").mkdir()
    shutil.copy(tmp_path / "trusted" / "model.safetensors", tmp_path / "plain")
    config = json.loads((tmp_path / "trusted" / "config.json").read_text())
    assert config.pop("auto_map")["AutoModelForCausalLM"] == "modeling_hope.HopeForCausalLM"
    (tmp_path / "plain" / "config.json").write_text(json.dumps(config))
    word_tokenizer.save_pretrained(tmp_path / "plain")
    (tmp_path / "pickled").mkdir()
    for name, value in (("config", model.config), ("model", model), ("cache", cache)):
        (tmp_path / "pickled" / name).write_bytes(pickle.dumps(value))
    environment = os.environ | {"HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-W", "ignore", registration_cases.__file__, str(tmp_path)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert int(ended.stdout.split()[-1]) == len(registration_cases.CLEAN + registration_cases.WITH_TRANSFORMERS)


def test_editors_see_the_names_that_are_imported_late():
    tree = ast.parse(Path(hope_hf.__file__).read_text(encoding="utf-8"))
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    (statement,) = block.body
    assert [alias.name for alias in statement.names] == hope_hf.__all__
