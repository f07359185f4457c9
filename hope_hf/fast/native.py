"""The C++ of `cpp/`, compiled where it runs: once for the processor at hand, into the user's cache.

Functions take a structure of addresses, which they read, and a range of the parts of their work.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from pathlib import Path

import torch
from torch import Tensor
from transformers.utils import logging

logger = logging.get_logger(__name__)

# of the widest vectors that the code may use; rows of numbers are multiples of it
VECTOR_BYTES = 64
POINTER = ctypes.c_void_p
_FOLDER = Path(__file__).with_name("cpp")
_COMPILERS = ("c++", "g++", "clang++")
# Sums are not reordered, and NaN stays NaN: no -ffast-math.
_FLAGS = ("-std=c++17", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math")
# Clang calls it so on some ARM processors.
_TARGETS = ("-march=native", "-mcpu=native")
_LIBRARY = ("-fPIC", "-shared")
# a compiler that hangs must not hang a training
_SECONDS = 120
_DTYPES = {torch.float32: "float32", torch.float64: "float64"}


def fields(kind: type, *names: str) -> list[tuple[str, type]]:
    """Fields of one kind, for a `ctypes.Structure`."""
    return [(name, kind) for name in names]


def set_addresses(arguments: ctypes.Structure, tensors: dict[str, Tensor | None]) -> None:
    """Write the addresses of tensors into the fields of these names. The tensors must outlive the call."""
    for name, tensor in tensors.items():
        address = None if tensor is None else tensor.data_ptr()
        setattr(arguments, name, address)


@lru_cache
def function(name: str, dtype: torch.dtype) -> ctypes._CFuncPtr | None:
    """The function of that name for numbers of `dtype`; `None` where it is not compiled."""
    library = _library()
    if library is None or dtype not in _DTYPES:
        return None
    symbol = f"{name}_{_DTYPES[dtype]}"
    compiled = getattr(library, symbol)
    compiled.argtypes = [POINTER, ctypes.c_int64, ctypes.c_int64]
    compiled.restype = None
    return compiled


def run(compiled: ctypes._CFuncPtr, arguments: ctypes.Structure, parts: int, least: int = 1) -> None:
    """Run all parts; each of torch's threads takes at least `least` of them. ctypes lets go of Python's lock."""
    most_threads = min(torch.get_num_threads(), parts // least)
    threads = max(1, most_threads)
    address = ctypes.byref(arguments)
    if threads == 1:
        compiled(address, 0, parts)
        return
    bounds = [parts * thread // threads for thread in range(threads + 1)]
    run_part = partial(compiled, address)
    with ThreadPoolExecutor(threads) as pool:
        results = pool.map(run_part, bounds[:-1], bounds[1:])
    # raises the error of a part
    list(results)


@lru_cache
def _library() -> ctypes.CDLL | None:
    """The compiled functions; `None` without a compiler, or where it fails."""
    compiler = _compiler()
    if compiler is None:
        logger.info("HOPE runs on torch's operators: there is no C++ compiler (CXX, c++, g++ or clang++).")
        return None
    try:
        return _load(compiler)
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        logger.warning(f"HOPE runs on torch's operators, which take longer: {compiler} failed ({_reason(error)}).")
        return None


def _reason(error: Exception) -> str:
    """One line: the first error that the compiler printed, or what Python says."""
    printed = getattr(error, "stderr", None) or str(error)
    lines = printed.strip().splitlines() or [type(error).__name__]
    for line in lines:
        if "error" in line:
            return line.strip()
    return lines[0].strip()


def _compiler() -> str | None:
    names = filter(None, (os.environ.get("CXX"), *_COMPILERS))
    paths = map(shutil.which, names)
    return next(filter(None, paths), None)


def _load(compiler: str) -> ctypes.CDLL:
    """The library of the cache, compiled unless it is there."""
    name = f"fast-{_key(compiler)}.so"
    try:
        folder = _cache_folder()
        folder.mkdir(parents=True, exist_ok=True)
        return _loaded(compiler, folder / name)
    except (OSError, RuntimeError):
        # No home, or one that cannot be written. A loaded library stays when its file goes.
        with tempfile.TemporaryDirectory(prefix="hope_hf-") as temporary:
            return _loaded(compiler, Path(temporary, name))


def _loaded(compiler: str, library: Path) -> ctypes.CDLL:
    """The library at a path, compiled unless it is there."""
    if not library.exists():
        _compile(compiler, library)
    return ctypes.CDLL(str(library))


def _compile(compiler: str, library: Path) -> None:
    """Write the library."""
    # under a name of its own, since the processes of a run begin together
    handle, unfinished = tempfile.mkstemp(suffix=".so", dir=library.parent)
    os.close(handle)
    sources = sorted(_FOLDER.glob("*.cpp"))
    command = [compiler, *_FLAGS, *_LIBRARY, "-o", unfinished, *sources]
    run_compiler = partial(subprocess.run, capture_output=True, text=True, timeout=_SECONDS)
    first_target, second_target = _TARGETS
    try:
        first_try = run_compiler([*command, first_target])
        if first_try.returncode:
            run_compiler([*command, second_target], check=True)
        os.replace(unfinished, library)
    finally:
        Path(unfinished).unlink(missing_ok=True)


def _cache_folder() -> Path:
    """`hope_hf` in `XDG_CACHE_HOME`, by default ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base, "hope_hf")


def _key(compiler: str) -> str:
    """Stands for sources, flags, compiler and processor: a home may be shared by unlike machines."""
    version = subprocess.run([compiler, "--version"], check=True, capture_output=True, timeout=_SECONDS)
    flags = " ".join(_FLAGS + _TARGETS)
    processor = _processor()
    key = hashlib.sha256(version.stdout)
    key.update(flags.encode())
    key.update(processor.encode())
    for source in sorted(_FOLDER.iterdir()):
        key.update(source.read_bytes())
    return key.hexdigest()[:20]


def _processor() -> str:
    """The processor's name and the instructions that it has."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    # on x86, on ARM, and on both; cores repeat them
    names = "flags", "Features", "model name"
    facts = {line for line in lines if line.startswith(names)}
    return "\n".join(sorted(facts))
