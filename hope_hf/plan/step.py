"""What one optimizer step does, for arithmetic and simulation alike."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class StepOptions:
    """The flags of `run_clm.py` on which a step's memory depends."""

    batch_size: int
    block_size: int
    accumulation: int = 1
    checkpointing: str = "none"
    optimizer: str = "adamw"
    sync_each_batch: bool = False
    reduce_dtype: torch.dtype = torch.float32
    attn_implementation: str | None = None
    trust_remote_code: bool = False
