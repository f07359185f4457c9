"""Tests of transformers' common suite that a peer of transformers runs and HOPE does not, each with the reason.

`tests/test_hf_suite_exceptions.py` freezes the list; `make hf-suite` fails for a test that is missing here, and for
one that is here without need.
"""

EXCEPTIONS: dict[str, dict[str, str]] = {
    # against Mamba-2
    "HopeMemory": {},
    # against Qwen3-Next
    "HopeAttention": {},
}
