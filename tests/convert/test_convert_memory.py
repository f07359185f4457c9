"""A conversion holds one file of weights and a block, whatever the size of the model."""

import subprocess
import sys

import pytest
import torch
from sources import config_of, model_of

# Converts, and prints how much the peak of its resident memory exceeds what it held before.
CHILD = """
import sys
from pathlib import Path
from hope_hf.convert import main

def kilobytes(name):
    return int(Path("/proc/self/status").read_text().split(name + ":")[1].split()[0])

# a first conversion loads every part of the libraries
assert main(["--from", sys.argv[1], "--output_dir", sys.argv[3] + "/first", *sys.argv[4:]]) == 0
Path("/proc/self/clear_refs").write_text("5")
before = kilobytes("VmRSS")
assert main(["--from", sys.argv[2], "--output_dir", sys.argv[3] + "/second", *sys.argv[4:]]) == 0
print("grown by", 1024 * (kilobytes("VmHWM") - before))
"""
# twelve blocks of 14 MB
WIDE = dict(
    hidden_size=768, intermediate_size=2048, num_attention_heads=12, num_key_value_heads=12, num_hidden_layers=12
)  # fmt: skip


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the peak of resident memory from /proc")
def test_the_peak_of_memory_is_a_file_and_a_block(saved, tmp_path):
    model = model_of(config_of("llama", **WIDE), torch.bfloat16)
    model.save_pretrained(tmp_path / "large", max_shard_size="60MB")
    sizes = [file.stat().st_size for file in (tmp_path / "large").glob("*.safetensors")]
    largest, whole = max(sizes), sum(sizes)
    block = sum(weight.nbytes for weight in model.model.layers[3].parameters())
    del model
    _, small = saved("llama", tokenizer=False)
    command = [sys.executable, "-c", CHILD, str(small), str(tmp_path / "large"), str(tmp_path / "out")]
    command += ["--levels", "512,2048"]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    grown = int(run.stdout.split("grown by")[1])
    assert grown <= largest + block, f"{grown:,} bytes for a file of {largest:,} and a block of {block:,}"
    assert whole > 2 * (largest + block)
