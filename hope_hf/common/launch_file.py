"""The file of `accelerate launch`: read, and checked for keys that accelerate would ignore or refuse.

The launcher passes on only values of known keys. A misspelled key, or one that the chosen version of FSDP does not
use, never reaches the processes, so they read the file again.
"""

import json
import os
import reprlib
from pathlib import Path

from .files import read_small
from .parser import nearest
from .recipe import read_yaml

MICRO_BATCH = "train_micro_batch_size_per_gpu"
"""DeepSpeed's name of the rows per process."""
# Keys that earlier versions of accelerate wrote.
OF_OLD_FILES = ("fp16", "dynamo_backend")
WHOLE_NUMBERS = ("num_processes", "num_machines", "machine_rank")
SECTIONS = ("fsdp_config", "deepspeed_config", "parallelism_config")

# Keys of FSDP's version 1 that version 2 ignores, and what to do instead.
OF_VERSION_1 = {
    "fsdp_sharding_strategy": "write fsdp_reshard_after_forward: true for FULL_SHARD or false for SHARD_GRAD_OP, a "
    "parallelism_config for HYBRID_SHARD (accelerate_configs/fsdp_hybrid.yaml), or take ddp.yaml for NO_SHARD",
    "fsdp_backward_prefetch": "give --fsdp_prefetch N",
    "fsdp_forward_prefetch": "give --fsdp_prefetch N",
    "fsdp_use_orig_params": "leave it out, version 2 always keeps the original parameters",
    "fsdp_sync_module_states": "leave it out, all processes make the same model",
}
# accelerate's wizard writes version 1's strategy under this key of version 2, and its launcher ignores it.
RESHARD = "fsdp_reshard_after_forward"
# Switches that accelerate declares as strings without a default.
SWITCHES_WITHOUT_DEFAULT = ("zero3_init_flag", "zero3_save_16bit_model")
# The launcher's flags before the name of a module, and options of Python before a value.
_MODULE = ("-m", "--module")
_PYTHON_OPTIONS_WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")
# Axes of a mesh that the trainer does not support.
UNSUPPORTED_AXES = {"parallelism_config_tp_size": "tensor", "parallelism_config_cp_size": "context"}
# accelerate refuses any of these with a DeepSpeed json, and its error lists all of them.
DECIDED_BY_JSON = (
    "mixed_precision", "zero_stage", "offload_optimizer_device", "offload_param_device", "zero3_save_16bit_model",
    "gradient_accumulation_steps", "gradient_clipping",
)  # fmt: skip


def check_launch_file() -> None:
    """Raise ValueError with one sentence if accelerate would ignore or refuse a key of this launch's file."""
    path = launch_file()
    if path is not None:
        read(path, f"The launch file {path}")


def read(path: Path, named: str) -> dict:
    """The checked content of a launch file. Raises ValueError with one sentence that names the file."""
    content = read_yaml(path, named)
    if not isinstance(content, dict):
        raise ValueError(f"{named} must hold lines of the form 'key: value'.")
    check(path, content)
    if "distributed_type" not in content:
        raise ValueError(f"{named} names no distributed_type: write one, or take a file of accelerate_configs/.")
    return content


def deepspeed_json() -> dict:
    """The DeepSpeed json that the launch file names; empty without one."""
    name = os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")
    return {} if name == "none" else json.loads(read_small(name))


def launch_file() -> Path | None:
    """The file on accelerate's command line, else the one that `accelerate config` wrote; None without accelerate."""
    try:
        words = Path(f"/proc/{os.getppid()}/cmdline").read_bytes().decode().split("\0")
    except (OSError, UnicodeDecodeError):
        return None
    program = _program(words)
    # Another program may have a --config_file of its own.
    if program is None or not Path(words[program]).name.startswith("accelerate"):
        return None
    flags = []
    for index, word in enumerate(words[program + 1 :], start=program + 1):
        if word in _MODULE or word.endswith(".py"):
            break
        name, _, value = word.partition("=")
        flag = name.replace("-", "_")
        if flag == "__config_file":
            path = Path(value or words[index + 1])
            return path if path.is_file() else None
        flags.append(flag)
    return _default_file(flags)


def _program(words: list[str]) -> int | None:
    """The place of the program or module that a command line runs, after Python and its options."""
    is_python = Path(words[0]).name.startswith(("python", "pypy"))
    places = iter(range(int(is_python), len(words)))
    for place in places:
        if words[place] in _PYTHON_OPTIONS_WITH_VALUE:
            next(places, None)
        elif not words[place].startswith("-"):
            return place
    return None


def _default_file(flags: list[str]) -> Path | None:
    """The file that `accelerate launch` reads without --config_file; None if a flag chooses an engine."""
    from accelerate.commands.config.config_args import default_config_file

    file = Path(default_config_file)
    chooses_engine = any(flag.startswith(("__cpu", "__multi", "__tpu", "__use", "__fsdp")) for flag in flags)
    return file if file.is_file() and not chooses_engine else None


def check(path: Path, content: dict) -> None:
    """Raise ValueError if `content`, of the file at `path`, has a key that would be ignored or refused."""

    def refuse(sentence: str):
        raise ValueError(f"{path}: {sentence}" + ("" if sentence.endswith("?") else "."))

    _check_sections(content, refuse)
    kind = content.get("distributed_type")
    processes = int(content.get("num_processes") or 1)
    if kind == "MULTI_CPU" and processes > 1:
        refuse("distributed_type MULTI_CPU starts a single process: write MULTI_GPU and set ACCELERATE_USE_CPU=true")
    if kind == "FSDP":
        _check_fsdp(content.get("fsdp_config") or {}, refuse)
    parallel = content.get("parallelism_config") or {}
    for key, axis in UNSUPPORTED_AXES.items():
        if int(parallel.get(key) or 1) > 1:
            refuse(f"{key} is {parallel[key]}, and {axis} parallelism is not supported in training: write 1")
    deepspeed = content.get("deepspeed_config") or {}
    if str(deepspeed.get("zero_stage", 2)) not in ("2", "3"):
        refuse(f"zero_stage is {deepspeed['zero_stage']}: write 2 or 3, or take accelerate_configs/ddp.yaml")
    if "deepspeed_config_file" in deepspeed:
        beside = [key for key in DECIDED_BY_JSON if key in content | deepspeed]
        if beside:
            refuse(f"{', '.join(beside)} may not be given with deepspeed_config_file, which decides alone: remove it")
    for key, value in deepspeed.items():
        if value == "nvme":
            refuse(f"{key} is nvme, which is not supported: write cpu")


def _check_sections(content: dict, refuse) -> None:
    """Refuse keys that accelerate does not have, and values that the processes cannot read."""
    # Imported here, since plain `hope-hf train` does not need it.
    from accelerate.commands.config.config_args import ClusterConfig
    from accelerate.commands.launch import launch_command_parser

    known = {action.dest: action for action in launch_command_parser()._actions}
    outside = {*ClusterConfig.__dataclass_fields__, *OF_OLD_FILES}
    for key, value in content.items():
        if key not in outside:
            refuse(f"{key} is no key of a launch file{nearest(str(key), outside) or ': leave it out'}")
        if key.endswith("_config") and value and not isinstance(value, dict):
            refuse(f"{key} is {reprlib.repr(value)}: write it as indented lines of the form 'key: value'")
        if key in WHOLE_NUMBERS and value is not None and not _is_whole(str(value).removeprefix("-")):
            refuse(f"{key} is {reprlib.repr(value)}: write a whole number")
    for section in SECTIONS:
        for key, value in (content.get(section) or {}).items():
            if key not in known:
                of_section = [name for name in known if name.startswith(section.split("_")[0])] or known
                refuse(f"accelerate ignores {key} in {section}{nearest(str(key), of_section) or ': leave it out'}")
            if isinstance(value, dict | list):
                refuse(f"{key} is {reprlib.repr(value)}: write it as one value")
            if value is None:
                continue
            # The launcher's parser does not check values that it passes on as environment variables.
            is_switch = known[key].default in ("true", "false") or key in SWITCHES_WITHOUT_DEFAULT
            is_strategy = key == RESHARD and content[section].get("fsdp_version") == 1
            if is_switch and not is_strategy and str(value).lower() not in ("true", "false"):
                refuse(f"{key} is {value}: write true or false")
            decided_later = section == "deepspeed_config" and value == "auto"
            if known[key].type is int and not _is_whole(str(value)) and not decided_later:
                refuse(f"{key} is {value}: write a whole number")


def _is_whole(text: str) -> bool:
    return text.isdecimal() and len(text) < 19


def _check_fsdp(config: dict, refuse) -> None:
    version = config.get("fsdp_version")
    if version not in (1, 2):
        refuse("fsdp_config names no fsdp_version, and accelerate would take the old one: write fsdp_version: 2")
    if version == 2:
        for key, instead in OF_VERSION_1.items():
            if key in config:
                refuse(f"{key} is a key of FSDP's version 1, which version 2 ignores: {instead}")
    elif RESHARD in config and str(config[RESHARD]).upper() != "FULL_SHARD":
        value = str(config[RESHARD]).upper()
        strategy = {"TRUE": "FULL_SHARD", "FALSE": "SHARD_GRAD_OP"}.get(value, value)
        refuse(
            f"{RESHARD}: {config[RESHARD]} is ignored under FSDP's version 1: write fsdp_sharding_strategy: {strategy}"
        )
    elif str(config.get("fsdp_use_orig_params", "true")).lower() != "true":
        refuse(
            "fsdp_use_orig_params is false, but level clocks need the original parameters: write true, or "
            "fsdp_version: 2"
        )
    if config.get("fsdp_auto_wrap_policy") == "SIZE_BASED_WRAP" and "fsdp_min_num_params" not in config:
        refuse("SIZE_BASED_WRAP needs a size: write fsdp_min_num_params: 1000000")
    if config.get("fsdp_auto_wrap_policy") == "NO_WRAP":
        refuse("NO_WRAP gathers the whole model at once: write fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP")
