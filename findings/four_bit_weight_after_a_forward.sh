#!/usr/bin/env bash
# bitsandbytes 0.50.2: on a processor with AVX512-BF16, reading a 4-bit weight after a forward gives other values.
#
# Guess: dequantize_4bit of a Linear4bit's weight gives the same matrix before and after the layer has been called.
# Seen: a forward without gradients packs the weight for the processor in place, and neither dequantize_4bit nor
# transformers' dequantize_bnb_weight, which calls it, heeds the packing. Values are off by half the largest weight
# and more; the forward itself stays right. No warning. state_dict() unpacks. Other processors do not pack: there the
# script has nothing to show and ends with status 2.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --no-compile torch==2.13.0 bitsandbytes==0.50.2 numpy
cd "$folder"
"$folder/env/bin/python" - <<'PROGRAM'
import sys

import bitsandbytes
import torch

torch.manual_seed(0)
layer = bitsandbytes.nn.Linear4bit(64, 64, bias=False, compute_dtype=torch.float32).eval().to("cpu")
if not layer.support_avx512bf16_for_cpu:
    print("this processor has no AVX512-BF16")
    sys.exit(2)


def matrix():
    return bitsandbytes.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state).float()


rows = torch.randn(8, 64)
before = matrix()
with torch.no_grad():
    output = layer(rows)
after = matrix()
apart = (after - before).abs().max().item()
forward = (output - rows @ before.T).abs().max().item()
layer.state_dict()
unpacked = (matrix() - before).abs().max().item()
print(f"largest weight {before.abs().max():.2f}; apart after a forward {apart:.2f}; after state_dict() {unpacked:.1e}")
print(f"error of the forward {forward:.1e}")
assert apart > before.abs().max() / 2 and forward < 0.05 and unpacked < 1e-2, "the behaviour changed"
PROGRAM
