"""The folder to upload: written under a temporary name, checked, and then renamed."""

from pathlib import Path
from tempfile import TemporaryDirectory

from safetensors import SafetensorError

from hope_hf.cli.files import share_weights
from hope_hf.cli.results import RESULTS_FILE

from .card import model_card
from .check import check_export
from .evaluation_facts import read_evaluation
from .source import load_source
from .training_facts import read_training

DEFAULT_LICENSE = "apache-2.0"


def export_folder(
    source: Path, out: Path, repo_id: str, license: str = DEFAULT_LICENSE, results: Path | None = None
) -> str:
    """Write weights, code, tokenizer, generation config and card of the HOPE in `source` to `out`.

    Args:
        source: a run's output folder, or another with a saved HOPE.
        out: does not exist or is empty; it appears complete and checked, or not at all.
        repo_id: the repository that the card's example names.
        license: of the weights, as the Hub names it.
        results: a `results.json` of `run_eval.py`; None: the one in `source`, where there is one.

    Returns:
        What the card's example printed.

    Raises:
        ValueError: a mistake in the arguments or a file that cannot be read or written, one sentence.
        ExportFailed: the written model does not load, or differs from the original.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"--to {out} exists and is not an empty folder: name a new one.")
    if results is None and (source / RESULTS_FILE).exists():
        results = source / RESULTS_FILE
    training = read_training(source)
    model, tokenizer = load_source(source)
    evaluation = read_evaluation(results, model) if results else None
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as place:
            folder = Path(place) / out.name
            model.save_pretrained(folder)
            share_weights(folder)
            tokenizer.save_pretrained(folder)
            model_card(model, repo_id, license, training, evaluation).save(folder / "README.md")
            printed = check_export(folder, repo_id, model)
            folder.rename(out)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{out} cannot be written: {getattr(error, 'strerror', None) or error}.") from error
    return printed
