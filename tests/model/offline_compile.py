"""Compiles the kernels of a scan for a Hopper GPU, without one: `python offline_compile.py WIDTH MADE ...`.

In place of every launch the kernel is compiled with the types of the launch's arguments, and a line of JSON says what
it takes of a GPU: registers and bytes of spills a thread, bytes of shared memory a program; and how many scalars are
products of 32 bits, which offsets in a long text overflow. Results are not computed.
"""

import json
import re
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
import triton
from scans import in_float32, plain_pieces, problem, ragged_pieces
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from hope_hf.model import memory_triton

TYPES = {
    torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.int8: "*i8", torch.int32: "*i32",
    int: "i32",
}  # fmt: skip
OPTIONS = ("num_warps", "num_stages")


def compiled(source: ASTSource, options: dict) -> dict:
    """What ptxas and Triton's first intermediate code say of a kernel."""
    began = time.perf_counter()
    kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.ptx")
        path.write_text(kernel.asm["ptx"])
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
        command = [tool, "-v", "--gpu-name=sm_90a", path, "-o", Path(folder, "kernel.cubin")]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers = re.search(r"Used (\d+) registers", said)[1]
    spills = re.search(r"(\d+) bytes spill stores", said)[1]
    narrow = re.findall(r"arith\.muli .* : i32\b", kernel.asm["ttir"])
    return {
        "kernel": source.fn.__name__, "warps": options["num_warps"], "registers": int(registers),
        "spills": int(spills), "shared": kernel.metadata.shared, "narrow": len(narrow),
        "seconds": round(time.perf_counter() - began, 1),
    }  # fmt: skip


def compile_launch(function, *args, about, done, warmup=None, grid=None, **kwargs):
    """In place of `JITFunction.run`."""
    options = {name: kwargs.pop(name) for name in OPTIONS}
    names = function.arg_names
    signature, constants, hints = {}, {}, {}
    for index, (name, value) in enumerate(zip(names, args, strict=False)):
        signature[name] = TYPES[value.dtype if isinstance(value, torch.Tensor) else type(value)]
        # what a launch finds out by itself: a number of 1 is a constant, allocations are aligned
        if not isinstance(value, torch.Tensor) and value == 1:
            signature[name], constants[(index,)] = "constexpr", 1
        elif isinstance(value, torch.Tensor) or value % 16 == 0:
            hints[(index,)] = [["tt.divisibility", 16]]
    for name, value in kwargs.items():
        signature[name] = "constexpr"
        constants[(names.index(name),)] = value
    key = (function.__name__, *sorted((name, str(value)) for name, value in kwargs.items()), *signature.values())
    if key not in done:
        done.add(key)
        source = ASTSource(function, signature, constants, hints)
        flags = [name for name, value in kwargs.items() if value is True]
        print(json.dumps({**about, **compiled(source, options), "flags": flags}), flush=True)


def without_content(queries, keys, values, inputs, memories, current, *_):
    """In place of `kernels_fla.read_content`, whose kernels are not ours."""
    return queries + keys + values, current


def compile_scan(width: int, made: str, cut: str, dtype: torch.dtype, done: set) -> None:
    """Compiles what a scan with its backward pass launches."""
    spans = (ragged_pieces if cut == "ragged" else plain_pieces)(64)
    options = {"rows": 1} if cut == "single" else {}
    inputs, memories, state, spans, _ = in_float32(*problem(spans, made=made, width=width, **options))
    about = {"width": width, "made": made, "cut": cut, "dtype": str(dtype)}
    JITFunction.run = lambda *args, **kwargs: compile_launch(*args, about=about, done=done, **kwargs)
    reads, after = partial(memory_triton.scan_triton, dtype=dtype)(inputs, memories, state, spans)
    (reads.sum() + after.current[0].sum()).backward()


if __name__ == "__main__":
    done = set()
    memory_triton.read_content = without_content
    for argument in sys.argv[1:]:
        width, made, cut, dtype = argument.split(",")
        compile_scan(int(width), made, cut, getattr(torch, dtype), done=done)
