"""GPUs that a run may be planned for. Figures of the makers' data sheets, none of them measured here."""

from dataclasses import dataclass

from hope_hf.cli.flops import TF32_SHARE
from hope_hf.cli.parser import nearest

GIB = 2**30


@dataclass(frozen=True)
class Gpu:
    """One GPU.

    Attributes:
        gib: memory.
        flops: dense matrix FLOP/s in bf16 and fp16.
        link: bytes a second and direction to the other GPUs of its machine: NVLink, or PCIe where it has none. Data
            sheets add both directions up.
    """

    name: str
    gib: int
    flops: float
    link: float


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("b200-180gb", 180, 2250e12, 900e9),
        Gpu("h200-141gb", 141, 989e12, 450e9),
        Gpu("h100-80gb", 80, 989e12, 450e9),
        Gpu("a100-80gb", 80, 312e12, 300e9),
        Gpu("a100-40gb", 40, 312e12, 300e9),
        Gpu("l40s-48gb", 48, 362e12, 32e9),
        Gpu("a6000-48gb", 48, 155e12, 56e9),
        Gpu("rtx4090-24gb", 24, 165e12, 32e9),
    )
}
# Of a GPU's memory, for CUDA's context, NCCL's buffers and what the allocator cannot use.
RESERVED = 0.08


def peak_flops(gpu: Gpu, precision: str) -> float:
    """Dense matrix FLOP/s under accelerate's mixed precision "no", "bf16" or "fp16"."""
    return gpu.flops * (TF32_SHARE if precision == "no" else 1)


def usable(gpu: Gpu) -> int:
    """Bytes that a plan may fill."""
    return int(gpu.gib * GIB * (1 - RESERVED))


def parse_gpus(text: str) -> list[Gpu]:
    """The GPUs of a list with commas, each once; ValueError that names an unknown one."""
    names = dict.fromkeys(word.strip().lower() for word in text.split(",") if word.strip())
    if not names:
        raise ValueError(f"--gpu {text!r} names none: write for instance h100-80gb,a100-40gb.")
    for name in names:
        if name not in GPUS:
            hint = nearest(name, GPUS) or f": choose of {', '.join(GPUS)}."
            raise ValueError(f"--gpu {name} is unknown{hint}")
    return [GPUS[name] for name in names]
