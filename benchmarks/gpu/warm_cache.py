"""Fills TRITON_CACHE_DIR with kernels for a Hopper GPU that is not there: `python benchmarks/gpu/warm_cache.py`.

Words name presets, comparisons of kernels as in run.py's order, and `trainer`; by default what the
archive of pack.sh has room for. Processes with different words may run side by side.
Compiles what parts.py launches on a GPU, in all configurations that the search for the fastest tries there, and
launches nothing. The cache belongs to the Triton that wrote it and to the folder in which it lies. Whether a real
GPU's driver takes the entries was not tried.
"""

import json
import os
import sys
from collections.abc import Iterable
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
HOPPER = (9, 0)


class Utilities:
    """What Triton asks of an H100 and an H200."""

    def get_device_properties(self, device: int) -> dict:
        return {"max_shared_mem": 232_448, "max_num_regs": 65_536, "multiprocessor_count": 132, "warpSize": 32}

    def load_binary(self, *arguments) -> tuple:
        """module, function, registers, spills and most threads of a program"""
        return 1, 1, 32, 0, 1024


class Card:
    """Triton's driver of that GPU; its tensors are the CPU's."""

    utils, binary_ext = Utilities(), "cubin"

    def __getattr__(self, name: str):
        constants = {
            "get_current_device": 0, "set_current_device": None, "get_current_stream": 0, "is_active": True,
            "get_current_target": GPUTarget("cuda", 90, 32), "get_device_capability": HOPPER,
            "get_active_torch_device": torch.device("cpu"), "get_device_interface": torch.cpu,
        }  # fmt: skip
        return lambda *arguments: constants[name]

    def map_python_to_cpp_type(self, name: str) -> str:
        return name

    def launcher_cls(self, *arguments):
        return lambda *launch: None

    def get_benchmarker(self):
        """A call compiles, and no configuration is faster than another."""

        def compile_it(call, **options) -> list[float]:
            call()
            return [1.0, 1.0, 1.0]

        return compile_it


@contextmanager
def pretended():
    """The GPU is there for Triton and for flash-linear-attention, and HOPE takes its kernels on the CPU's tensors."""
    driver.set_active(Card())
    # HOPE reads the variable, Triton the knob: nothing is interpreted
    triton.knobs.propagate_env = False
    triton.knobs.runtime.interpret = False
    environment = {"TRITON_INTERPRET": "1", "FLA_CACHE_RESULTS": "0"}
    names = {"get_device_capability": lambda *_: HOPPER, "get_device_name": lambda *_: "NVIDIA H100 80GB HBM3"}
    # Without a device the library asks none for its shared memory, and tries other configurations.
    names["device_count"] = lambda: 1
    with patch.dict(os.environ, environment), patch.multiple(torch.cuda, **names):
        import fla.utils

        enough = fla.utils.check_shared_mem
        # asked with the index of a tensor's device, and the CPU has none
        with patch.object(fla.utils, "check_shared_mem", lambda arch="none", index=0: enough(arch, index or 0)):
            yield


def compile_blocks(preset: str) -> None:
    """A training step and decoding of HOPE and of the gated DeltaNet, one block of each kind of the preset."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from benchmarks.gpu import parts
    from benchmarks.measuring import Decoder, train_step
    from benchmarks.quality.models import build
    from hope_hf import HopeConfig

    size = {"vocab_size": 64, "level_intermediate_sizes": [64]}
    kinds = list(dict.fromkeys(HopeConfig.from_preset(preset).layer_types))
    hope = HopeConfig.from_preset(preset, **size, num_hidden_layers=len(kinds), layer_types=kinds)
    peer = build("gated_deltanet", parts.case_of(preset)[1].size)
    shape = json.loads(peer.overrides) | {"vocab_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    for config in (hope, AutoConfig.for_model(peer.model_type, **shape)):
        network = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        # Some kernels are compiled for a number of tokens.
        for length in parts.GPU_LENGTHS:
            if rows := parts.GPU_TOKENS[preset] // length:
                print(preset, config.model_type, rows, length, flush=True)
                train_step(network, torch.randint(64, (rows, length)))
                if config is hope and length in parts.GPU_LENGTHS[:2]:
                    documents = parts.starts(rows, length, 300)
                    train_step(network, torch.randint(64, (rows, length)), position_ids=documents)
        for context in parts.GPU_CONTEXTS:
            decoder = Decoder(network, torch.randint(64, (1, context)))
            for _ in range(2):
                decoder()


def compile_step(dtype: torch.dtype, tokens: int, lengths: Iterable[int], **fields) -> None:
    """Training steps of a block of `pilot`; in float32 under autocast to bfloat16, as the trainer takes them."""
    from transformers import AutoModelForCausalLM

    from benchmarks.measuring import train_step
    from hope_hf import HopeConfig

    size = {"vocab_size": 64, "level_intermediate_sizes": [64], "num_hidden_layers": 1}
    network = AutoModelForCausalLM.from_config(HopeConfig.from_preset("pilot", **size, **fields), dtype=dtype)
    for length in lengths:
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
            train_step(network, torch.randint(64, (tokens // length, length)))


def main(asked: list[str]) -> None:
    with pretended(), patch.dict(os.environ, HOPE_KERNELS="fla"):
        from benchmarks.gpu import parts, run

        rows = parts.Rows(Path(os.devnull), "kernels")
        # What is computed is of no use, since nothing is launched.
        rows.write = lambda **columns: print(columns) if "note" in columns else None
        for name in asked or run.PACKED:
            if name.startswith("kernels"):
                parts.kernels(rows, *name.split()[1:])
            elif name == "trainer":
                tokens, lengths = parts.GPU_TOKENS["pilot"], parts.GPU_LENGTHS[:1]
                rows.attempt(partial(compile_step, torch.float32, tokens, lengths))
            else:
                rows.attempt(partial(compile_blocks, name), preset=name)
    cubins = len(list(Path(os.environ["TRITON_CACHE_DIR"]).rglob("*.cubin")))
    took = os.times()
    # the assembler is a process of its own
    print(f"{cubins} kernels; {sum(took[:4]):.0f} CPU seconds")


if __name__ == "__main__":
    main(sys.argv[1:])
