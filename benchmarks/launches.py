"""Operators that a training step launches on a GPU, counted without one: HOPE over Llama.

    python benchmarks/launches.py [--preset mid] [--length 2048]

The step runs on fake tensors, which have shapes and no numbers. What flash-linear-attention computes
counts as one operator forward and one backward, as torch's attention does and on a GPU its `rms_norm`; views count
nothing.
"""

import argparse
import os
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.gpu_speed import size_of
from benchmarks.quality_models import HOPE, LLAMA, build
from benchmarks.step import Calls
from hope_hf import PRESETS


class OneOperator(torch.autograd.Function):
    """Of the first tensor's shape and dtype, as one operator each way."""

    @staticmethod
    def forward(ctx, *tensors):
        ctx.shapes = tensors
        return torch.relu(tensors[0])

    @staticmethod
    def backward(ctx, gradient):
        torch.relu(gradient)
        return tuple(torch.empty_like(tensor) for tensor in ctx.shapes)


def stand_in_kernels() -> None:
    """Modules of the library's names, and `rms_norm`, as one operator."""

    def chunk_gated_delta_rule(q, k, v, g, beta, initial_state=None, **_):
        return OneOperator.apply(v, q, k, g, beta, initial_state), None

    for name in ("fla", "fla.ops", "fla.ops.gated_delta_rule"):
        sys.modules[name] = module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        module.chunk_gated_delta_rule = module.fused_recurrent_gated_delta_rule = chunk_gated_delta_rule
    F.rms_norm = lambda x, shape, weight, eps: OneOperator.apply(x, weight)


def launches(name: str, preset: str, length: int) -> int:
    """Operators of forward and backward of one text."""
    model = build(name, size_of(preset))
    with FakeTensorMode():
        network = model.new(torch.bfloat16)
        # neither tokens nor labels: on a CPU HOPE checks their numbers
        embedded = torch.zeros(1, length, network.config.hidden_size, dtype=torch.bfloat16)
        with Calls() as calls:
            logits = network(inputs_embeds=embedded, use_cache=False).logits
            F.cross_entropy(logits[0].float(), torch.zeros(length, dtype=torch.long)).backward()
    return calls.number


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="mid", choices=list(PRESETS))
    parser.add_argument("--length", type=int, default=2048, help="tokens of the text")
    options = parser.parse_args(argv)
    stand_in_kernels()
    # fake tensors are on a CPU, where the kernels run in Triton's interpreter alone
    os.environ |= {"HOPE_KERNELS": "fla", "TRITON_INTERPRET": "1"}
    hope, llama = (launches(name, options.preset, options.length) for name in (HOPE, LLAMA))
    os.environ["HOPE_KERNELS"] = "torch"
    plain = launches(HOPE, options.preset, options.length)
    print("| preset | tokens | llama | hope with kernels | over llama | hope without |\n|---|---|---|---|---|---|")
    print(f"| {options.preset} | {options.length:,} | {llama:,} | {hope:,} | {hope / llama:.2f} | {plain:,} |")


if __name__ == "__main__":
    main()
