"""Fast paths for CPUs, written by hand: the results of the plain code in `hope_hf.model`, in less time.

They are registered in `model.backends.FAST`, and are no part of a model on the Hub: its code computes the plain way,
and takes these paths where this package is installed with the same code.
"""

from pathlib import Path

from ..model.backends import FAST
from .delta_rows import scan_rows
from .delta_scan import scan_fused
from .gated_norm import gated_norm_compiled
from .norm import gated_norm_in_blocks
from .one_token import fast_token_paths, forget_text
from .sparse_qkv import make_qkv_tiled
from .sparse_reads import read_sparse_fused
from .window_reads import read_bands_for_training

# with the plain code that each stands for
PATHS = {
    # memory_scan.scan_plain, under the delta rule
    "compiled_scan_delta": scan_rows,
    "scan_delta": scan_fused,
    # modeling_hope.HopeBlock.forward, of a single token
    "token": fast_token_paths,
    "forget_text": forget_text,
    # layers.gated_norm
    "compiled_gated_norm": gated_norm_compiled,
    "gated_norm": gated_norm_in_blocks,
    # sparse_branches.read_sparse and make_qkv
    "sparse_reads": read_sparse_fused,
    "sparse_qkv": make_qkv_tiled,
    # window_attention.read_band, of all bands
    "window_reads": read_bands_for_training,
}
FAST.update(PATHS)


def is_written_for(folder: Path) -> bool:
    """Whether the model's files in a folder are those of this package, byte for byte."""
    for own_file in (Path(__file__).parents[1] / "model").glob("*.py"):
        file = folder / own_file.name
        if file.name != "__init__.py" and file.exists() and file.read_bytes() != own_file.read_bytes():
            return False
    return True
