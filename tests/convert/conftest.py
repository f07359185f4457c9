"""Fixtures of conversions: a saved source, and the command."""

import pytest
import torch
from sources import config_of, model_of

from hope_hf.convert import main


@pytest.fixture
def saved(tmp_path, word_tokenizer):
    """`saved(kind, dtype=..., shard=..., **fields)` saves a model and its tokenizer; returns model and folder."""

    def save(kind, shard="1GB", tokenizer=True, dtype=torch.float32, **options):
        model = model_of(config_of(kind, **options), dtype)
        folder = tmp_path / "source"
        model.save_pretrained(folder, max_shard_size=shard)
        if tokenizer:
            word_tokenizer.save_pretrained(folder)
        return model, folder

    return save


@pytest.fixture
def convert(tmp_path):
    """`convert(source, *flags)` runs the command; returns the new folder."""

    def run(source, *flags):
        out = tmp_path / "made" / "hope"
        assert main(["--from", str(source), "--output_dir", str(out), *map(str, flags)]) == 0
        return out

    return run


@pytest.fixture
def refused(tmp_path, capsys):
    """`refused(source, *flags)` expects one sentence and no new file; returns the sentence."""

    def attempt(source, *flags, status=2):
        before = sorted(tmp_path.rglob("*"))
        capsys.readouterr()
        assert main(["--from", str(source), "--output_dir", str(tmp_path / "new"), *map(str, flags)]) == status
        complaint = capsys.readouterr().err
        assert complaint.startswith("error: ") and complaint.count("\n") == 1, complaint
        assert sorted(tmp_path.rglob("*")) == before
        return complaint

    return attempt
