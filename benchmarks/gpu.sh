#!/usr/bin/env bash
# What HOPE does on one GPU: compares its kernels with the plain code there, then measures it beside its peers.
# Takes under ten minutes; needs the packages of pyproject.toml and pytest. Writes to the folder given.
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
  timeout 420 python benchmarks/gpu_speed.py --output_dir "$out"
} 2>&1 | tee "$out/gpu.log"
