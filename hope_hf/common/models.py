"""The model that a command line names: loaded, or new from a config with the user's overrides."""

import os
from dataclasses import fields, is_dataclass
from pathlib import Path

import torch
from huggingface_hub import ModelCard, ModelCardData
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import CONFIG_NAME

from .adapters import base_of_adapter
from .flags import ModelArguments, require_local
from .overrides import parse_overrides
from .parser import nearest
from .process import MISTAKES, one_line
from .weight_names import ADAPTER_CONFIG
from .weights import find_file, load_model

DEFAULT_PRESET = "tiny"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")


def build_config(args: ModelArguments, tokenizer, vocab_size: int, presets: dict):
    """The config of a new model, its special tokens taken from the tokenizer.

    `presets` are HOPE's named sizes. Raises ValueError for unknown names, fields and values.
    """
    overrides = parse_overrides(args.config_overrides)
    model_type = args.model_type or "hope"
    if args.config_name in presets or (args.config_name is None and model_type == "hope"):
        if model_type != "hope":
            raise ValueError(f"--config_name {args.config_name} is a size of HOPE, but --model_type is {model_type}.")
        config_class, given = _config_class("hope"), presets[args.config_name or DEFAULT_PRESET]
    elif args.config_name is None:
        config_class, given = _config_class(model_type), {}
    else:
        hint = nearest(args.config_name, presets)
        if hint and not os.path.isdir(args.config_name):
            raise ValueError(f"--config_name {args.config_name} is neither a folder nor a size of HOPE{hint}")
        base = load_config(args.config_name, "config_name", args)
        if args.model_type and base.model_type != args.model_type:
            raise ValueError(f"--config_name {args.config_name} is a {base.model_type} and --model_type {model_type}.")
        config_class, given = type(base), _plain(base)
    # A config derives some fields from others (heads from width). Pass only the given fields, never the finished
    # default config, so that the overridden ones are used.
    example = _make(config_class, given)
    _check_names(overrides, example)
    special = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id", None) for name in ("bos", "eos", "pad")}
    # An embedding does not train the row of its padding token, but the EOS token must be trained.
    if special["pad_token_id"] == special["eos_token_id"]:
        special["pad_token_id"] = None
    for name, value in overrides.items():
        # Strict configs refuse the integer 1 for a rate.
        if type(value) is int and isinstance(getattr(example, name, None), float):
            overrides[name] = float(value)
    config = _make(config_class, {**given, "vocab_size": vocab_size, **special, **overrides})
    padding = config.pad_token_id
    if padding is not None and padding >= config.vocab_size:
        raise ValueError(
            f"--config_overrides: pad_token_id {padding} lies outside the vocabulary of {config.vocab_size} entries."
        )
    return config


def load_config(source: str, flag: str, args: ModelArguments):
    """The config of a folder or Hub name that was given with `--flag`, or as the word FLAG without a flag."""
    named = flag if flag.isupper() else f"--{flag}"
    require_local(source, named)
    _require_config(source, named)
    try:
        base = base_of_adapter(source)
        if base is not None:
            return load_config(base, flag, args)
        values, _ = PreTrainedConfig.get_config_dict(source)
        _check_dtype(values)
        return AutoConfig.from_pretrained(source, trust_remote_code=args.trust_remote_code)
    except MISTAKES as error:
        where = "" if os.path.isdir(source) else " is not a folder and"
        raise ValueError(f"{named} {source}{where} cannot be loaded: {one_line(error)}") from error


def _require_config(source: str, named: str):
    """ValueError for a folder that holds no model. Where a folder in it does, the sentence names that one."""
    # Not `Path.is_dir`: a word that is too long for a name is no folder.
    if not os.path.isdir(source):
        return
    folder = Path(source)
    if any((folder / name).exists() for name in (CONFIG_NAME, ADAPTER_CONFIG)):
        return
    inner = sorted(path.parent for path in folder.glob(f"*/{CONFIG_NAME}"))
    gguf = sorted(path.name for path in folder.glob("*.gguf"))
    fix = "name the folder of a model"
    if inner:
        fix += f", such as {inner[0]}"
    elif gguf and named == "--from":
        fix += f", or add --gguf_file {gguf[0]}"
    raise ValueError(f"{named} {source} holds no {CONFIG_NAME}: {fix}.")


def build_model(args: ModelArguments, config, dtype: torch.dtype = torch.float32, **loading) -> PreTrainedModel:
    """The model on the CPU; ValueError if it cannot be built or loaded. `loading`: options of `from_pretrained`."""
    options = {"attn_implementation": args.attn_implementation} if args.attn_implementation else {}
    options |= {"dtype": dtype, "trust_remote_code": args.trust_remote_code}
    source = args.model_name_or_path
    if source:
        return load_model(source, config, f"--model_name_or_path {source}", **options, **loading)
    try:
        return AutoModelForCausalLM.from_config(config, **options)
    except MISTAKES as error:
        raise ValueError(f"The model cannot be built: {one_line(error)}") from error


def place_of_tokenizer(source: str) -> str:
    """The folder or Hub name with a model's tokenizer: an adapter that has none uses that of the model it adapts."""
    base = base_of_adapter(source)
    if base is None or any(find_file(source, name) for name in TOKENIZER_FILES):
        return source
    return place_of_tokenizer(base)


def card_metadata(page: Path) -> ModelCardData:
    """The metadata of a model's README.md; empty if there is no such file, no metadata in it, or it is no YAML."""
    try:
        return ModelCard.load(page, ignore_metadata_errors=True).data
    # huggingface_hub passes on all errors of YAML, and of the fields' classes.
    except Exception:
        return ModelCardData()


def is_hope(config) -> bool:
    """Whether the config is HOPE's."""
    return config.model_type == "hope"


def _check_dtype(values: dict):
    # Not every attribute of torch is a dtype, and the error for an unknown one does not name the file.
    dtype = values.get("dtype", values.get("torch_dtype"))
    # Models of several parts have a dict of dtypes.
    if dtype is None or isinstance(dtype, dict):
        return
    attribute = getattr(torch, dtype, None) if isinstance(dtype, str) else None
    if not isinstance(attribute, torch.dtype) or not attribute.is_floating_point:
        raise ValueError(f'its config.json has the dtype {dtype!r}, write one like "float32" or "bfloat16"')


def _config_class(model_type: str):
    if model_type not in CONFIG_MAPPING:
        known = [*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, "hope"]
        raise ValueError(f"--model_type {model_type} is unknown to transformers{nearest(model_type, known)}")
    return CONFIG_MAPPING[model_type]


def _check_names(overrides: dict, config):
    names = list(_plain(config))
    if is_dataclass(config):
        names += [field.name for field in fields(config)]
    known = {name for name in names if not name.startswith("_")}
    for name in overrides:
        if name not in known:
            raise ValueError(
                f"--config_overrides: {type(config).__name__} has no field {name!r}{nearest(name, known)}"
            )


def _plain(config) -> dict:
    values = config.to_dict()
    for key in ("model_type", "transformers_version", "architectures", "_name_or_path"):
        values.pop(key, None)
    return values


def _make(config_class, values: dict):
    try:
        return config_class(**values)
    except MISTAKES as error:
        raise ValueError(f"--config_overrides: {config_class.__name__} is not valid: {one_line(error)}") from error
