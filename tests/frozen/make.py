"""Writes files that `test_frozen.py` loads, in the formats of the code at hand: `python tests/frozen/make.py NAME`.

The folder NAME then holds

    plain/      a run of one process that stopped after step 2 of 4: weights and optimizer in one file each
    sharded/    the same of two processes under FSDP2 with --save_sharded: a file of each from every process
    cache/      what the model of plain/ has read, as `HopeCache.save_pretrained` writes it
    learned/    the same of two rows of unequal length, and what levels have learned from them
    expected.json   what the code of then made of them: losses of steps 3 and 4, evaluation, logits after the caches

`first` is of commit 4e509c2, before the files of the package were merged, `second` of 99a4aad, before the core was
rewritten for reading. Make another before a change of a format; drop one that files need not survive, and say so in
the commit.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CONFIG = {
    "vocab_size": 260,
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "head_dim": 8,
    "layer_types": ["hope_memory", "sparse_attention", "full_attention"],
    "level_intermediate_sizes": [16, 16],
    "level_periods": [128, 512],
    "memory_chunk_size": 16,
    "sparse_block_size": 16,
    "sparse_compress_stride": 8,
    "sparse_top_k": 3,
    "sparse_window": 16,
}
# Relative paths: a run's settings name its files.
FLAGS = ["--train_file", "text.txt", "--block_size", "64", "--max_train_steps", "4", "--checkpointing_steps", "2"]
FLAGS += ["--logging_steps", "1", "--cpu_threads", "1", "--config_overrides", json.dumps(CONFIG)]
FLAGS += ["--output_dir", "run"]
ONE_PROCESS = [*FLAGS, "--per_device_train_batch_size", "2"]


def write_text(folder: Path) -> None:
    """The corpus of the runs."""
    lines = (f"The number {n} has the square {n * n} and the cube {n**3}; half of it is {n / 2}." for n in range(300))
    (folder / "text.txt").write_text("\n\n".join(lines), encoding="utf-8")


LEARNS = {"periods": [16, 64], "rate": 0.02}


def logits_after(model, cache) -> list[list[float]]:
    """Of each row, logits after three tokens read after the text of `cache`."""
    text = torch.tensor([[7, 8, 9]]).expand(cache.num_sequences, -1)
    with torch.no_grad():
        return model(text, cache=cache).logits[:, -1].tolist()


def losses(run: Path) -> list[float]:
    """Losses of the steps that `run` wrote down, its evaluation last."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [row.get("train/loss", row.get("eval/loss")) for row in rows]


def read_rows(model, cache) -> None:
    """Let levels learn from two rows, the first of which has 20 tokens of padding in front."""
    model.config.level_learning = LEARNS
    mask = torch.ones(2, 100, dtype=torch.long)
    mask[0, :20] = 0
    with torch.no_grad():
        model(torch.arange(200).view(2, 100) * mask, attention_mask=mask, cache=cache, learn=True)


def keep_checkpoint(run: Path, kept: Path) -> None:
    """The run as its second step left it, without the model's code, which the tests do not run."""
    shutil.copytree(run / "checkpoint-2", kept / "checkpoint-2", ignore=shutil.ignore_patterns("*.py"))
    manifest = kept / "checkpoint-2" / "manifest.json"
    content = json.loads(manifest.read_text(encoding="utf-8"))
    content["files"] = {name: facts for name, facts in content["files"].items() if not name.endswith(".py")}
    del content["sha256"]
    content["sha256"] = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    manifest.write_text(json.dumps(content, indent=1), encoding="utf-8")
    state = json.loads((run / "run.json").read_text(encoding="utf-8")) | {"complete": False, "command": ["run_clm.py"]}
    (kept / "run.json").write_text(json.dumps(state, indent=1), encoding="utf-8")


def main() -> None:
    from transformers import AutoModelForCausalLM

    from hope_hf import HopeCache

    python = [sys.executable, "-m"]
    launch = [*python, "accelerate.commands.launch", "--config_file", str(ROOT / "accelerate_configs/fsdp2.yaml")]
    launch += ["--num_processes", "2", str(ROOT / "run_clm.py"), *FLAGS, "--per_device_train_batch_size", "1"]
    starts = {
        "plain": [sys.executable, str(ROOT / "run_clm.py"), *ONE_PROCESS],
        "sharded": [*launch, "--save_sharded"],
    }
    environment = os.environ | {"PYTHONPATH": str(ROOT), "ACCELERATE_USE_CPU": "true"}
    made, expected = HERE / sys.argv[1], {}
    for name, command in starts.items():
        with tempfile.TemporaryDirectory() as folder:
            write_text(Path(folder))
            subprocess.run(command, cwd=folder, env=environment, check=True)
            run = Path(folder, "run")
            shutil.rmtree(made / name, ignore_errors=True)
            keep_checkpoint(run, made / name)
            shutil.rmtree(run)
            shutil.copytree(made / name, run)
            subprocess.run(starts["plain"], cwd=folder, env=environment, check=True)
            expected[name] = losses(run)
    model = AutoModelForCausalLM.from_pretrained(made / "plain/checkpoint-2").eval()
    text, rows = HopeCache(model.config), HopeCache(model.config)
    with torch.no_grad():
        model(torch.arange(100)[None], cache=text)
    read_rows(model, rows)
    for name, cache in (("cache", text), ("learned", rows)):
        shutil.rmtree(made / name, ignore_errors=True)
        cache.save_pretrained(made / name, model)
        expected[name] = logits_after(model, cache)
    (made / "expected.json").write_text(json.dumps(expected, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
