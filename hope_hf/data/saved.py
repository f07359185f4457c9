"""Folders that `Dataset.save_to_disk` and `DatasetDict.save_to_disk` wrote."""

import json
import os
from pathlib import Path

from datasets import Dataset, concatenate_datasets

from hope_hf.cli.files import is_inside, read_small

_STATE, _SPLITS = "state.json", "dataset_dict.json"


def is_saved(folder: str) -> bool:
    """Whether it is such a folder, of one data set or of several splits."""
    return any(os.path.isfile(os.path.join(folder, name)) for name in (_STATE, _SPLITS))


def load_saved(folder: str, source: str, split: str | None = None, streaming: bool = False):
    """All its splits as a dict, or one, mapped into memory; a data set without splits is `train`.

    Raises ValueError that names `source`.
    """
    if split is None:
        return {split: load_saved(folder, source, split, streaming) for split in _splits(folder, source) or ["train"]}
    files = saved_files(folder, source, split)
    try:
        dataset = concatenate_datasets([Dataset.from_file(file) for file in files])
    except (OSError, ValueError) as error:
        raise ValueError(f"{source} cannot be read, save the data set again: {error}") from error
    return dataset.to_iterable_dataset(num_shards=len(files)) if streaming else dataset


def saved_files(folder: str, source: str, split: str) -> list[str]:
    """The .arrow files of a data set, or of its `split` where it has splits. Raises ValueError that names `source`."""
    path, splits = Path(folder), _splits(folder, source)
    if splits and split not in splits:
        raise ValueError(f"{source} has no split {split!r}: name one of its folders, {', '.join(splits)}.")
    if splits:
        path = path / split
    state = _read(path / _STATE, source)
    try:
        names = [entry["filename"] for entry in state["_data_files"]]
    except (KeyError, TypeError):
        names = [None]
    if not names or not all(is_inside(name) and (path / name).is_file() for name in names):
        raise ValueError(f"{source}: {path / _STATE} names files that are not there: save the data set again.")
    return [str(path / name) for name in names]


def _splits(folder: str, source: str) -> list[str]:
    file = Path(folder) / _SPLITS
    if not file.is_file():
        return []
    document = _read(file, source)
    splits = document.get("splits") if isinstance(document, dict) else None
    if not isinstance(splits, list) or not splits or not all(map(is_inside, splits)):
        raise ValueError(f"{source}: {file} names no splits: save the data set again.")
    return splits


def _read(file: Path, source: str) -> object:
    try:
        return json.loads(read_small(file))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{source}: {file} cannot be read, save the data set again: {error}") from error
