"""`--level_optimizers`: valid values, and one clear sentence for invalid ones."""

import json
import os
import re

import pytest

from hope_hf.optim import LevelOptions, parse_level_optimizers

ENTRY = {"0": {"lr_factor": 2, "betas": [0.9, 0.99]}, "2": {"optimizer": "muon", "weight_decay": 0.0}}
PARSED = {0: LevelOptions(lr_factor=2, betas=(0.9, 0.99)), 2: LevelOptions(optimizer="muon", weight_decay=0.0)}


def test_text_file_and_mapping_say_the_same(tmp_path):
    file = tmp_path / "levels.json"
    file.write_text(json.dumps(ENTRY))
    for source in (json.dumps(ENTRY), str(file), ENTRY):
        assert parse_level_optimizers(source) == PARSED
    assert parse_level_optimizers(None) == {}


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("no_such_file.json", "no_such_file.json cannot be read"),
        ('{"0": ', "is not JSON"),
        ("[1]", "is a list"),
        ('{"fast": {}}', 'has the level "fast"'),
        ('{"0": {}, "00": {}}', "names level 00 twice"),
        ('{"0": {"lr": 2.0}}', 'unknown key "lr" for level 0: use optimizer, lr_factor, betas, weight_decay'),
        ('{"1": {"optimizer": "sgd"}}', 'has optimizer "sgd" for level 1: give adamw or muon'),
        ('{"1": {"lr_factor": 0}}', "has lr_factor 0 for level 1"),
        ('{"1": {"betas": [0.9, 1.0]}}', "give two numbers"),
        ('{"1": {"weight_decay": -0.1}}', "has weight_decay -0.1"),
    ],
)
def test_mistakes_are_refused(source, said):
    with pytest.raises(ValueError, match=f"--level_optimizers.*{re.escape(said)}"):
        parse_level_optimizers(source)


def test_a_file_that_is_none_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large").write_bytes(b" " * (2**20 + 1))
    for name in ("pipe", "large"):
        with pytest.raises(ValueError, match="it is no file of at most 1,048,576 bytes.: give JSON"):
            parse_level_optimizers(str(tmp_path / name))
