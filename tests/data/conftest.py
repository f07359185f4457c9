"""A mixture of four small corpora and its shards, made once."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from datasets.utils.logging import disable_progress_bar
from four_corpora import TEXT_TOGETHER, prepare_words, write_corpora

from hope_hf.data import shard_writer
from hope_hf.data.prepare import main


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> None:
    """Each test has a cache of its own."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture(scope="session")
def mixture(tmp_path_factory) -> Iterator[Path]:
    """The mixture file; its tokenizer is beside it. Little text is encoded together, so there are several shards."""
    disable_progress_bar()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard_writer, "CHARACTERS", TEXT_TOGETHER)
        yield write_corpora(tmp_path_factory.mktemp("corpora"))


@pytest.fixture(scope="session")
def shards(mixture) -> Path:
    """Its folder of shards."""
    folder = mixture.parent / "shards"
    assert main(prepare_words(mixture, folder)) == 0
    return folder
