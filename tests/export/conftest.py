"""A saved HOPE with its tokenizer, as a run saves it, and its export."""

import json
import random
from pathlib import Path

import pytest
import torch

from hope_hf import HopeConfig, HopeForCausalLM
from hope_hf.common.results import provenance
from hope_hf.common.run_arguments import Arguments
from hope_hf.data import train_tokenizer
from hope_hf.evaluation import flags, report
from hope_hf.evaluation.result import SuiteResult
from hope_hf.evaluation.subject import Subject
from hope_hf.export import main

WORDS = "the memory of a model reads and writes while it learns what was said before in this long text".split()
REPOSITORY = "owner/small-hope"


@pytest.fixture(scope="session")
def trained(tmp_path_factory) -> Path:
    """The folder of a run: weights far from their initial values, tokenizer, and the records of run_clm.py."""
    folder = tmp_path_factory.mktemp("trained")
    generator = random.Random(1)
    tokenizer = train_tokenizer([" ".join(generator.choices(WORDS, k=200))], 300)
    torch.manual_seed(0)
    chunks = dict(memory_chunk_size=8, level_intermediate_sizes=[32, 32])
    sizes = dict(hidden_size=32, num_hidden_layers=2, head_dim=16, level_periods=[1024, 4096])
    model = HopeForCausalLM(HopeConfig(vocab_size=len(tokenizer), **sizes, **chunks))
    with torch.no_grad():
        for block in model.model.layers:
            block.mixer.initial_memory.weight.normal_(std=0.25)
            block.mixer.o_proj.weight.mul_(20)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    flags = Arguments(train_file=str(folder / "my books" / "*.txt"), output_dir=str(folder), max_train_steps=7)
    command = [str(folder / "run_clm.py"), "--train_file", flags.train_file, f"--output_dir={folder}"]
    record = {
        "identity": flags.identity(),
        "num_processes": 2,
        "complete": True,
        **provenance(),
        "command": command,
    }
    (folder / "run.json").write_text(json.dumps(record))
    (folder / "metrics.jsonl").write_text('{"step": 1, "tokens": 512}\n{"step": 7, "tokens": 3584}\n')
    losses = {"eval_loss": 5.25, "eval_perplexity": 190.5, "eval_bits_per_byte": 2.5, "eval_tokens": 99}
    (folder / "all_results.json").write_text(json.dumps(losses))
    return folder


@pytest.fixture(scope="session")
def write_results(trained):
    """Write a report of run_eval.py on `trained` into a folder, and return the path of its results.json."""

    def write(folder: Path, limit: int | None = None) -> Path:
        text = str(trained / "my books" / "held out.txt")
        row = {"n": 640, "loss": 5.5, "loss_stderr": 0.25, "perplexity": 244.7, "bits_per_byte": 2.6, "accuracy": 0.1}
        passkey = {"length": 1024, "depth": 0.5, "n": 4, "exact": 0.75, "exact_stderr": 0.25}
        results = {
            "perplexity": SuiteResult({f"Text: {text}": [row]}),
            "passkey": SuiteResult({"Passkey": [passkey]}),
            "memory": SuiteResult({"Gates": [{"layer": index, "rate": 0.5} for index in range(50)]}),
        }
        args = flags.Arguments(
            model_name_or_path=str(trained), validation_file=text, output_dir=str(folder), limit=limit
        )
        subject = Subject(HopeForCausalLM.from_pretrained(trained), None)
        record = report.make_record(args, subject, results, {}, 1.0)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "results.json").write_text(report.as_json(record))
        return folder / "results.json"

    return write


@pytest.fixture(scope="session")
def exported(trained, write_results, tmp_path_factory) -> Path:
    """The export of `trained` by `main`, with results."""
    folder = tmp_path_factory.mktemp("exported")
    flags = ["--license", "mit", "--results", str(write_results(folder / "report"))]
    assert main([str(trained), "--to", str(folder / "small-hope"), *flags]) == 0
    return folder / "small-hope"
