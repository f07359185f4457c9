"""Where a result comes from: command, versions, commit."""

import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_PACKAGES = (
    "hope_hf", "torch", "transformers", "accelerate", "datasets", "tokenizers", "safetensors", "evaluate", "lm_eval"
)  # fmt: skip


def provenance() -> dict:
    """The command, the packages' versions and the package's git commit, JSON-able; None for what is not known."""
    return {
        "command": sys.argv,
        "versions": {"python": platform.python_version(), **{name: _installed(name) for name in _PACKAGES}},
        "git": {"commit": _git("rev-parse", "HEAD"), "modified": bool(_git("status", "--porcelain"))},
    }


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _git(*arguments: str) -> str | None:
    try:
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
