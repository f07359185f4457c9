"""Does a change alter a bit? Hashes of small models, and curves of all launch files, of two checkouts.

In a checkout of the commit before, then in the one to be compared, on the same machine:

    PYTHONPATH=$PWD python .../tests/frozen/compare.py save FILE [--curves NAME ...]
    PYTHONPATH=$PWD python .../tests/frozen/compare.py check FILE [--curves NAME ...]

`check` names what differs and ends with status 1. Without `--curves`: initial values, losses, logits, gradients,
cached logits, states, cache files and generated tokens of 21 models, in float32 and bfloat16 (half a minute). With it:
losses and gradient norms of 20 steps under these files of accelerate_configs/, on the CPU (a minute each).
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import warnings
from itertools import pairwise
from pathlib import Path

import make
import torch

from hope_hf import HopeCache, HopeConfig, HopeForCausalLM

SPARSE = dict(sparse_block_size=8, sparse_compress_stride=4, sparse_top_k=4, sparse_window=8)
CASES = {
    "delta": {},
    "delta, k and v": dict(memory_projections=["k", "v"]),
    "delta, k": dict(memory_projections=["k"]),
    "delta, v": dict(memory_projections=["v"]),
    "delta, no value gate": dict(memory_value_gate=False),
    "delta, erase gate": dict(memory_erase_bias=[-6.0, 3.0]),
    "delta, rate 1.99": dict(memory_learning_rate_max=1.99, memory_learning_rate_bias=[0.0, 8.0]),
    "delta, retention": dict(retention_bias=[1.0, 8.0]),
    "delta, nothing recomputed": dict(recompute_chunks=0),
    "delta, no convolution": dict(conv_kernel_size=1),
    "paper": dict(memory_rule="paper"),
    "paper, k": dict(memory_rule="paper", memory_projections=["k"]),
    "paper, depth 2": dict(memory_rule="paper", memory_depth=2),
    "hybrid": dict(layer_types=["hope_memory", "full_attention"], memory_projections=["k", "v"]),
    "attention": dict(layer_types=["full_attention"] * 2),
    "attention, grouped": dict(layer_types=["full_attention"] * 2, num_attention_heads=4, num_key_value_heads=2),
    "sparse": dict(layer_types=["sparse_attention"] * 2) | SPARSE,
    "sparse, grouped": dict(layer_types=["sparse_attention"] * 2, num_attention_heads=4, num_key_value_heads=1)
    | SPARSE,
    "sparse hybrid": dict(layer_types=["hope_memory", "sparse_attention"]) | SPARSE,
    "independent levels": dict(level_variant="independent"),
    "tied head": dict(tie_word_embeddings=True),
}
SIZES = dict(vocab_size=64, hidden_size=32, num_hidden_layers=2, head_dim=8, memory_chunk_size=8, recompute_chunks=4)
SIZES |= dict(level_intermediate_sizes=[16, 16], level_periods=[64, 256])


def digest(*values) -> str:
    """A hash over tensors, bit for bit, or over what `str` makes of other values."""
    found = hashlib.sha256()
    for value in values:
        if isinstance(value, torch.Tensor):
            found.update(str((value.dtype, tuple(value.shape))).encode())
            value = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        found.update(value if isinstance(value, bytes) else str(value).encode())
    return found.hexdigest()[:16]


def by_name(tensors) -> list[torch.Tensor]:
    return [tensor for _, tensor in sorted(tensors)]


def hashes(options: dict) -> dict[str, str]:
    """What a model with these options computes, as hashes by name."""
    torch.manual_seed(0)
    first = HopeForCausalLM(HopeConfig(**SIZES | options))
    found = {"initial values": digest(*by_name(first.named_parameters())), "flops": str(first.flops_per_token(512))}
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in by_name(first.named_parameters()):
            # so that no initial 0 hides a path
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    ids = torch.randint(0, 64, (2, 203), generator=generator)
    for precision, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        model = first.to(dtype)
        results = trained(model.train(), ids) | read(model.eval(), ids)
        for name, value in results.items():
            found[f"{precision}: {name}"] = value
    return found


def hashes_of_all() -> dict[str, str]:
    found = {}
    for case, options in CASES.items():
        for name, value in hashes(options).items():
            found[f"{case}: {name}"] = value
    return found


def trained(model: HopeForCausalLM, ids: torch.Tensor) -> dict[str, str]:
    """Losses and gradients: of several rows and of one, under autocast, and of packed rows with recomputed blocks."""
    found = {}
    packed = torch.cat([torch.arange(length) for length in (50, 83, 70)]).expand(2, -1)
    for name in ("rows", "one row", "autocast", "packed"):
        options = dict(position_ids=packed, skip_logits=True) if name == "packed" else {}
        # short enough that nothing is recomputed
        text = ids[:1, :30] if name == "one row" else ids
        if name == "packed":
            model.gradient_checkpointing_enable()
        with torch.autocast("cpu", torch.bfloat16, enabled=name == "autocast"):
            loss, *logits = model(input_ids=text, labels=text, use_cache=False, **options).to_tuple()
        loss.backward()
        gradients = [p.grad for p in by_name(model.named_parameters()) if p.grad is not None]
        found |= {f"{name}, loss and logits": digest(loss, *logits), f"{name}, gradients": digest(*gradients)}
        model.zero_grad()
    model.gradient_checkpointing_disable()
    return found


@torch.no_grad()
def read(model: HopeForCausalLM, ids: torch.Tensor) -> dict[str, str]:
    """A padded prompt, tokens one by one and a second piece of text through a cache; its file; generated tokens."""
    cache = HopeCache(model.config)
    mask = torch.ones(2, 90, dtype=torch.long)
    mask[0, :5] = 0
    logits = []
    for start, end in pairwise([0, 43, *range(44, 51), 90]):
        out = model(input_ids=ids[:, start:end], attention_mask=mask[:, :end], cache=cache)
        logits.append(out.logits)
    state = []
    for name, tensor in sorted(cache.state_tensors().items()):
        # not the tokens themselves, nor the digest of them in versions of before
        if not name.startswith("archive.") and not name.endswith(".digest"):
            state += [name, tensor]
    found = {"cached logits": digest(*logits), "state": digest(*state)}
    for cache_kind in ("dynamic", "static"):
        options = dict(max_new_tokens=12, do_sample=False, pad_token_id=0, disable_compile=True)
        made = model.generate(ids[:, :30], cache_implementation=cache_kind, **options)
        found[f"generated, {cache_kind}"] = digest(made)
    return found


def curve(launch_file: str) -> list[list]:
    """Step, loss, gradient norm and evaluation of 20 steps of a small hybrid."""
    processes = 1 if launch_file.startswith("single") else 2
    # Muon needs whole matrices
    optimizer = "adamw" if launch_file.startswith(("fsdp1", "deepspeed")) else "muon"
    configs, program = Path("accelerate_configs").resolve(), Path("run_clm.py").resolve()
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", f"{configs / launch_file}.yaml"]
    command += ["--num_processes", str(processes), str(program), *make.FLAGS, "--optimizer", optimizer]
    command += ["--max_train_steps", "20", "--checkpointing_steps", "20", "--gradient_checkpointing"]
    command += ["--per_device_train_batch_size", str(2 // processes)]
    with tempfile.TemporaryDirectory() as folder:
        make.write_text(Path(folder))
        environment = os.environ | {"ACCELERATE_USE_CPU": "true", "PYTHONPATH": str(Path.cwd())}
        subprocess.run(command, cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL)
        rows = [json.loads(line) for line in Path(folder, "run/metrics.jsonl").read_text().splitlines()]
    return [[row.get(key) for key in ("step", "train/loss", "train/grad_norm", "eval/loss")] for row in rows]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=("save", "check"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--curves", nargs="+", metavar="NAME", help="files of accelerate_configs/, without .yaml")
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    found = {name: curve(name) for name in args.curves} if args.curves else hashes_of_all()
    if args.command == "save":
        args.file.write_text(json.dumps(found, indent=1), encoding="utf-8")
        print(f"{len(found)} values of {Path.cwd()} are in {args.file}")
        return 0
    saved = json.loads(args.file.read_text(encoding="utf-8"))
    different = [name for name in sorted(saved.keys() | found.keys()) if saved.get(name) != found.get(name)]
    print("\n".join(f"differs: {name}" for name in different) or f"all {len(found)} values are equal")
    return int(bool(different))


if __name__ == "__main__":
    sys.exit(main())
