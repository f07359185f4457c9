"""A conversion holds one file of weights and a block, whatever the size of the model."""

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file
from sources import config_of
from transformers import AutoModelForCausalLM

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


def write_shards(folder, per_file):
    """A model of random weights with some blocks a file; returns the bytes of the largest file, a block, and all."""
    config = config_of("llama", **WIDE)
    config.architectures, config.dtype = ["LlamaForCausalLM"], torch.bfloat16
    config.save_pretrained(folder)
    with torch.device("meta"):
        shapes = {name: weight.shape for name, weight in AutoModelForCausalLM.from_config(config).state_dict().items()}
    generator = torch.Generator().manual_seed(0)
    files = {}
    for name, shape in shapes.items():
        layer = int(name.split(".")[2]) if ".layers." in name else 0
        weight = torch.randn(shape, generator=generator, dtype=torch.float32).mul_(0.02).bfloat16()
        files.setdefault(layer // per_file, {})[name] = weight
    index = {}
    for number, weights in files.items():
        save_file(weights, folder / f"part-{number}.safetensors", metadata={"format": "pt"})
        index |= dict.fromkeys(weights, f"part-{number}.safetensors")
    content = {"metadata": {}, "weight_map": index}
    (folder / "model.safetensors.index.json").write_text(json.dumps(content))
    sizes = [sum(weight.nbytes for weight in weights.values()) for weights in files.values()]
    block = sum(shape.numel() for name, shape in shapes.items() if ".layers.3." in name)
    return max(sizes), 2 * block, sum(sizes)


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the peak of resident memory from /proc")
def test_the_peak_of_memory_is_a_file_and_a_block(saved, tmp_path):
    _, small = saved("llama", tokenizer=False)
    (tmp_path / "large").mkdir()
    file, block, whole = write_shards(tmp_path / "large", per_file=4)
    command = [sys.executable, "-c", CHILD, str(small), str(tmp_path / "large"), str(tmp_path / "out")]
    command += ["--levels", "512,2048"]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    grown = int(run.stdout.split("grown by")[1])
    assert grown <= file + block, f"{grown:,} bytes for a file of {file:,} and a block of {block:,}"
    assert whole > 2 * (file + block)
