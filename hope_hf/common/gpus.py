"""The table of GPUs. Figures are those of the makers' data sheets; none was measured here."""

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .parser import nearest

if TYPE_CHECKING:
    import torch

GIB = 2**30
TF32_SHARE = 0.5
"""TF32 FLOP/s over bf16 FLOP/s; matrix products of an fp32 run are in TF32 (`hope-hf train --tf32`, the default)."""
# Share of a GPU's memory for CUDA's context, NCCL's buffers and what the allocator cannot use.
RESERVED = 0.08


@dataclass(frozen=True)
class Gpu:
    """One GPU.

    Attributes:
        gib: memory in GiB.
        flops: dense matrix FLOP/s in bf16 and fp16.
        link: bytes per second and direction to the other GPUs of its machine: NVLink, or PCIe if it has none. Data
            sheets state the sum of both directions.
        device: a regular expression that matches a part of torch's name of the device.
    """

    name: str
    gib: int
    flops: float
    link: float
    device: str

    @property
    def usable(self) -> int:
        """Bytes that a run may use."""
        return int(self.gib * GIB * (1 - RESERVED))

    def peak_flops(self, precision: str) -> float:
        """Dense matrix FLOP/s under accelerate's mixed precision "no", "bf16" or "fp16"."""
        return self.flops * (TF32_SHARE if precision == "no" else 1)


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("b200-180gb", 180, 2250e12, 900e9, "B200"),
        Gpu("h200-141gb", 141, 989e12, 450e9, "H200(?! NVL)"),
        Gpu("h100-80gb", 80, 989e12, 450e9, "H100(?! PCIe| NVL)"),
        Gpu("h100-nvl-94gb", 94, 835e12, 300e9, "H100 NVL"),
        Gpu("h100-pcie-80gb", 80, 756e12, 64e9, "H100 PCIe"),
        Gpu("a100-80gb", 80, 312e12, 300e9, "A100.*80GB"),
        Gpu("a100-40gb", 40, 312e12, 300e9, "A100"),
        Gpu("l40s-48gb", 48, 362e12, 32e9, "L40S"),
        Gpu("a6000-48gb", 48, 155e12, 56e9, "RTX A6000"),
        Gpu("rtx4090-24gb", 24, 165e12, 32e9, "RTX 4090$"),
    )
}


def peak_flops(device: "torch.device", precision: str) -> float | None:
    """Peak matrix FLOP/s of a device; None for a CPU and for a GPU that is not in the table."""
    if device.type != "cuda":
        return None
    # Not at the top: the names of GPUs are read from flags without torch.
    import torch

    name = torch.cuda.get_device_name(device)
    for gpu in GPUS.values():
        if re.search(gpu.device, name):
            return gpu.peak_flops(precision)
    return None


def parse_gpus(text: str) -> list[Gpu]:
    """The GPUs of a comma-separated list, each once; ValueError that names an unknown one."""
    names = dict.fromkeys(word.strip().lower() for word in text.split(",") if word.strip())
    if not names:
        raise ValueError(f"--gpu {text!r} names no GPU: write for instance h100-80gb,a100-40gb.")
    for name in names:
        if name not in GPUS:
            hint = nearest(name, GPUS) or f": choose among {', '.join(GPUS)}."
            raise ValueError(f"--gpu {name} is unknown{hint}")
    return [GPUS[name] for name in names]
