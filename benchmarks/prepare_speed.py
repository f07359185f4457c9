"""How fast does `python -m hope_hf.data.prepare` turn text into token shards?

    python benchmarks/prepare_speed.py --tokenizer_name gpt2 [--files '*.txt'] [--rounds 3]

Beside it, on the same text and tokenizer, one after another in every round: a loop of the tokenizers library that
writes the ids to a file, `datasets.map` with the tokenizer of transformers, and the same with the package's encoder.
Prints tokens per second (median of the rounds) and the ratio to the loop. Every way uses all cores that it may.
"""

import argparse
import tempfile
import time
from pathlib import Path
from statistics import median

import numpy as np
from datasets import Dataset, disable_caching, disable_progress_bars
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from hope_hf.data.corpus import corpus_documents
from hope_hf.data.files import find_files, load_files
from hope_hf.data.packing import tokenize
from hope_hf.data.prepare import main as prepare

TOGETHER = 64


def loop(texts: list[str], name: str, folder: Path) -> None:
    """The tokenizers library alone, and the ids of a batch after another in one file."""
    tokenizer = (
        Tokenizer.from_file(f"{name}/tokenizer.json") if Path(name).is_dir() else Tokenizer.from_pretrained(name)
    )
    with (folder / "tokens.bin").open("wb") as file:
        for start in range(0, len(texts), TOGETHER):
            for row in tokenizer.encode_batch(texts[start : start + TOGETHER], add_special_tokens=False):
                file.write(np.array(row.ids, dtype=np.uint16).tobytes())


def mapped(texts: list[str], name: str, folder: Path) -> None:
    """`datasets.map` with a call of transformers' tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(name)
    documents = Dataset.from_dict({"text": texts})
    documents.map(
        lambda rows: {"input_ids": tokenizer(rows["text"], add_special_tokens=False)["input_ids"]},
        batched=True,
        remove_columns=["text"],
        cache_file_name=str(folder / "mapped.arrow"),
    )


def packed(texts: list[str], name: str, folder: Path) -> None:
    """The data path of a run without shards."""
    tokenize(Dataset.from_dict({"text": texts}), AutoTokenizer.from_pretrained(name))


def prepared(texts: list[str], name: str, folder: Path) -> None:
    """Shards, from a parquet file."""
    words = [str(folder.parent / "mix.yaml"), "--tokenizer_name", name, "--output_dir", str(folder)]
    if prepare(words) != 0:
        raise SystemExit(1)


WAYS = {"tokenizers loop": loop, "datasets.map": mapped, "run without shards": packed, "prepare": prepared}


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokenizer_name", required=True)
    parser.add_argument("--files", help="text beside the built-in corpus")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    disable_progress_bars()
    disable_caching()
    texts = [text for _, text in corpus_documents()]
    if args.files:
        texts += load_files(find_files(args.files, "--files"), "--files")["text"]
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as scratch:
        Dataset.from_dict({"text": texts}).to_parquet(f"{scratch}/text.parquet")
        Path(scratch, "mix.yaml").write_text(f"corpora: {{text: {{files: {scratch}/text.parquet}}}}")
        for number in range(args.rounds):
            for way, measure in WAYS.items():
                folder = Path(scratch, f"{number}-{way}")
                folder.mkdir()
                begin = time.perf_counter()
                measure(texts, args.tokenizer_name, folder)
                seconds[way].append(time.perf_counter() - begin)
        tokens = Path(scratch, "0-tokenizers loop", "tokens.bin").stat().st_size // 2
    print(f"{len(texts):,} documents, {sum(len(text.encode()) for text in texts):,} bytes, {tokens:,} tokens")
    print("| way | tokens per second | over the loop |\n|---|---|---|")
    for way, times in seconds.items():
        ratio = median(base / own for base, own in zip(seconds["tokenizers loop"], times, strict=True))
        print(f"| {way} | {tokens / median(times):,.0f} | {ratio:.2f} |")


if __name__ == "__main__":
    main()
