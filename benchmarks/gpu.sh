#!/usr/bin/env bash
# What HOPE does on one GPU: compares its kernels with the plain code there, then measures it beside its peers.
# Takes about ten minutes; needs the packages of pyproject.toml and pytest. Every row is written as it is measured.
#   bash benchmarks/gpu.sh runs/gpu
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=${1:?usage: bash benchmarks/gpu.sh FOLDER}
mkdir -p "$out"
{
  nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
  python -c 'import torch, transformers, importlib.metadata as m
print("torch", torch.__version__, "transformers", transformers.__version__)
for name in ("triton", "fla-core", "flash-attn", "mamba-ssm", "causal-conv1d", "tilelang"):
    try: print(name, m.version(name))
    except m.PackageNotFoundError: print(name, "is not installed")'
  # A wrong kernel is a result, too: the times are taken all the same.
  python -m pytest -q -p no:cacheprovider -m "kernels or gpu" tests/model || true
  flags=(--presets pilot mid --models hope hope_torch llama mamba2 gated_deltanet --tokens_per_step 32768
    --lengths 2048 8192 32768 --contexts 2048 8192 --new_tokens 32)
  timeout 420 python benchmarks/speed.py peers --device cuda --output_dir "$out" "${flags[@]}" || true
  python benchmarks/speed.py peers --report --output_dir "$out"
} 2>&1 | tee "$out/gpu.log"
