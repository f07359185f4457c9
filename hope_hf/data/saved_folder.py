"""Folders that `Dataset.save_to_disk` wrote: their .arrow files, in one data set or in several splits."""

import os
from pathlib import Path

from hope_hf.common.files import is_inside, read_object

_STATE = "state.json"
_SPLITS = "dataset_dict.json"


def is_saved(folder: str) -> bool:
    """Whether `save_to_disk` wrote it, of one data set or of several splits."""
    # Unlike Path.is_file, it returns False for a name that is too long.
    return os.path.isfile(f"{folder}/{_STATE}") or os.path.isfile(f"{folder}/{_SPLITS}")


def load_saved(folder: str, source: str, split: str | None = None, streaming: bool = False):
    """A saved data set, mapped into memory: all splits as a dict, or one; without splits it counts as `train`.

    Raises ValueError that names `source`.
    """
    splits = _splits(folder, source)
    if split is None:
        return {name: load_saved(folder, source, name, streaming) for name in splits or ["train"]}
    if split != "train" and not splits:
        raise ValueError(f"{source} has no splits, and split names {split}: leave it out.")
    # Not at the top: the files are found without datasets, which takes seconds to be imported.
    from datasets import Dataset, concatenate_datasets

    files = saved_files(folder, source, split)
    try:
        dataset = concatenate_datasets(list(map(Dataset.from_file, files)))
    except (OSError, ValueError) as error:
        raise ValueError(f"{source} cannot be read, save the data set again: {error}") from error
    return dataset.to_iterable_dataset(num_shards=len(files)) if streaming else dataset


def saved_files(folder: str, source: str, split: str) -> list[str]:
    """The .arrow files of a data set, or of its `split` if it has splits. Raises ValueError that names `source`."""
    path = Path(folder)
    splits = _splits(folder, source)
    if splits:
        if split not in splits:
            raise ValueError(f"{source} has no split {split!r}: name one of its folders, {', '.join(splits)}.")
        path = path / split
    state_file = path / _STATE
    state = read_object(state_file, f"{source}:", "save the data set again")
    files = []
    for entry in state.get("_data_files") or [{}]:
        name = entry.get("filename") if isinstance(entry, dict) else None
        if not is_inside(name) or not (path / name).is_file():
            raise ValueError(f"{source}: {state_file} names files that are not there: save the data set again.")
        files.append(str(path / name))
    return files


def _splits(folder: str, source: str) -> list[str]:
    file = Path(folder) / _SPLITS
    if not file.is_file():
        return []
    splits = read_object(file, f"{source}:", "save the data set again").get("splits")
    if not isinstance(splits, list) or not splits or not all(map(is_inside, splits)):
        raise ValueError(f"{source}: {file} names no splits: save the data set again.")
    return splits
