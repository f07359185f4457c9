"""Dtypes of accelerate's mixed precisions."""

import torch

LOW_PRECISION = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""Dtypes by accelerate's names."""
