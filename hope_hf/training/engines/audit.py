"""Which stretch of every parameter and buffer a process holds, and in which dtypes."""

import os
from collections.abc import Iterator
from pathlib import Path

from .base import Engine, dtype_name

HEADER = "name kind shape start end copy dtype compute reduce device trained".split()


def write_audit(folder: str | os.PathLike, engine: Engine) -> None:
    """`parameters_rank<N>.tsv`: a row for each parameter and buffer of the model, with the columns of `HEADER`.

    - name, shape: of the whole tensor, as in the unwrapped model; names of tied parameters are joined by " = ".
    - start, end: the elements of the flattened tensor that this process holds; equal if none.
    - copy: whether another process counts them: rows without it, of all processes, make the model.
    - dtype: as stored; compute: in the forward pass; reduce: of gradients summed over processes, "-" for none.
    """
    rows = ["\t".join(map(str, row)) for row in (HEADER, *_parameters(engine), *_buffers(engine))]
    file = Path(folder) / f"parameters_rank{engine.accelerator.process_index}.tsv"
    file.write_text("\n".join(rows) + "\n", encoding="utf-8")


def _parameters(engine: Engine) -> Iterator[tuple]:
    compute = engine.compute_dtype()
    for part in engine.weight_slices():
        name, held = part.names[0], part.tensors["weight"]
        if name not in engine.trained:
            continue
        dtype, trained = dtype_name(held.dtype), engine.trained[name]
        reduce = engine.reduce_dtype(name) if trained else None
        yield (
            " = ".join(part.names), "parameter", list(part.shape), part.start, part.start + held.numel(), part.is_copy,
            dtype, compute or dtype, "-" if reduce is None else dtype_name(reduce), held.device, trained,
        )  # fmt: skip


def _buffers(engine: Engine) -> Iterator[tuple]:
    copy = not engine.accelerator.is_main_process
    for name, buffer in engine.buffers().items():
        compute = engine.buffer_dtype() if buffer.is_floating_point() else None
        dtype = dtype_name(buffer.dtype)
        yield (
            name, "buffer", list(buffer.shape), 0, buffer.numel(), copy,
            dtype, dtype if compute is None else dtype_name(compute), "-", buffer.device, False,
        )  # fmt: skip
