"""The command-line parser of all programs: dataclasses of flags, and one sentence for each mistake.

It reads what transformers' `HfArgumentParser` reads, without the seconds that transformers takes to be imported.
"""

import argparse
import difflib
import os
import sys
from collections.abc import Collection, Sequence
from dataclasses import MISSING, Field, fields
from types import NoneType
from typing import Literal, get_args, get_origin

# Names of flags and config fields in other programs, so that an unknown name is answered with this project's name.
# Pairs: this project's names (the first that exists counts), and the names elsewhere. `x=N`: a config field.
_USUAL = (
    (("per_device_train_batch_size", "batch_size"), "batch_size batch bs train_batch_size micro_batch_size mbs"),
    (("learning_rate",), "lr max_lr peak_lr rate"),
    (("model_name_or_path",), "model model_path model_name model_dir model_id checkpoint ckpt pretrained base_model"),
    (("dataset_name",), "dataset hf_dataset data_name"),
    (("train_file", "files"), "data data_path data_file train_data text text_file corpus input input_file file"),
    (("validation_file",), "eval_file val_file valid_file test_file eval_data val_data validation_data"),
    (("max_train_steps",), "steps max_steps num_steps train_steps total_steps iterations iters max_iters"),
    (("num_train_epochs",), "epochs epoch num_epochs max_epochs"),
    (
        ("block_size", "lengths", "max_position_embeddings"),
        "seq_length seq_len sequence_length max_length max_len max_seq_length max_seq_len context_length context ctx "
        "ctx_len context_size n_ctx n_positions",
    ),
    (("report_to wandb",), "wandb use_wandb wandb_project"),
    (("report_to tensorboard",), "tensorboard"),
    (("resume_from_checkpoint",), "resume resume_from resume_path restart"),
    (("output_dir", "to"), "output out out_dir save_dir output_path save_path results_dir run_dir"),
    (("config_name",), "preset size model_size config model_config"),
    (("tokenizer_name",), "tokenizer tokenizer_path"),
    (("num_warmup_steps",), "warmup warmup_iters warm_up warmup_steps"),
    (("weight_decay",), "wd decay"),
    (("gradient_accumulation_steps",), "grad_accum accumulation_steps gradient_accumulation grad_accumulation_steps"),
    (("max_grad_norm",), "clip grad_clip gradient_clipping clip_grad_norm max_norm"),
    (("adam_beta1",), "beta1"),
    (("adam_beta2",), "beta2"),
    (("adam_epsilon",), "eps epsilon"),
    (("lr_scheduler_steps",), "lr_decay_iters lr_decay_steps decay_steps"),
    (("lr_scheduler_type",), "scheduler lr_scheduler schedule"),
    (("gradient_checkpointing",), "activation_checkpointing recompute"),
    (("torch_compile",), "compile"),
    (("eval_steps",), "eval_interval eval_every"),
    (("logging_steps",), "log_interval log_every log_steps"),
    (("checkpointing_steps",), "save_interval save_every checkpoint_interval checkpoint_every save_steps"),
    (("dataloader_num_workers",), "num_workers workers"),
    (("cpu_threads",), "threads num_threads n_threads"),
    (("seed",), "random_seed rng_seed"),
    (("suite",), "suites benchmark benchmarks"),
    (("num_fewshot",), "fewshot shots num_shots n_shot"),
    (("device", "gpu"), "gpu gpus cuda device"),
    (
        ("hidden_size", "n_embd", "d_model", "hidden_size=N"),
        "hidden_size n_embd d_model dim embed_dim hidden_dim width",
    ),
    (
        ("num_hidden_layers", "n_layer", "num_layers", "num_hidden_layers=N"),
        "num_hidden_layers n_layer n_layers num_layers layers depth",
    ),
    (
        ("num_attention_heads", "n_head", "num_heads", "num_attention_heads=N"),
        "num_attention_heads n_head n_heads num_heads heads",
    ),
    (
        ("intermediate_size", "n_inner", "ffn_dim", "d_ff", "level_intermediate_sizes", "intermediate_size=N"),
        "intermediate_size n_inner ffn_dim d_ff mlp_dim ffn_hidden_size",
    ),
    (("vocab_size", "vocab_size=N"), "vocab_size vocab vocabulary_size n_vocab"),
)
_OURS = {name: ours for ours, names in _USUAL for name in names.split()}


class _Help(argparse.RawDescriptionHelpFormatter):
    """Lists each flag once, a switch that is on together with its `--no_` form, and informative defaults once."""

    def add_argument(self, action):
        if f"--no_{action.dest}" not in action.option_strings:
            super().add_argument(action)

    def _format_action_invocation(self, action):
        if not isinstance(action.default, bool) or not action.option_strings:
            return super()._format_action_invocation(action)
        name = action.option_strings[0]
        return f"{name}, --no_{name[2:]}" if action.default else name

    def _get_help_string(self, action):
        default = action.default
        if default is None or default is False or default is argparse.SUPPRESS or "default" in action.help:
            return action.help
        shown = "on" if default is True else f"{default:,}" if isinstance(default, int) else default
        return f"{action.help} (default: {shown})"


YES, NO = ("yes", "true", "t", "y", "1"), ("no", "false", "f", "n", "0")


def read_switch(word: str) -> bool:
    """The value of a switch that is written out."""
    if word.lower() in YES:
        return True
    if word.lower() in NO:
        return False
    raise argparse.ArgumentTypeError(f"{word!r} is neither of {', '.join(YES)} nor of {', '.join(NO)}")


class Parser(argparse.ArgumentParser):
    """The flags of dataclasses, in one spelling each; a mistake raises ValueError instead of printing the usage.

    A word such as `--output-dir` is read as `--output_dir`, and messages and `--help` name the latter alone.

    groups: dataclasses; the flags of each are a group of `--help`, named by `_argument_group_name`. A list takes
        several words, a switch none or one.
    example, link: a command and a documentation page, shown at the end of `--help`.
    first: flags of a first day; `--help` then begins with them, the example and the page.
    """

    def __init__(
        self, groups: Sequence[type] = (), *, example: str = "", link: str = "", first: Sequence[str] = (), **options
    ):
        options["epilog"] = f"example: {example}\nmore: {link}" if example else None
        super().__init__(formatter_class=_Help, **options)
        self._flag_groups = tuple(groups)
        for group in groups:
            name = getattr(group, "_argument_group_name", None)
            place = self if name is None else self.add_argument_group(name)
            for field in fields(group):
                _add_flag(place, field)
        self._first = [self._option_string_actions[f"--{name}"] for name in first]

    def parse_groups(self, words: list[str]) -> list:
        """An object of each dataclass, from the words of a command line; ValueError for a mistake."""
        values = vars(self.parse_args(words))
        objects = []
        for group in self._flag_groups:
            names = [field.name for field in fields(group)]
            objects.append(group(**{name: values[name] for name in names}))
        return objects

    def format_help(self):
        if not self._first:
            return super().format_help()
        formatter = self._get_formatter()
        formatter.add_usage(self.usage, self._actions, self._mutually_exclusive_groups)
        formatter.add_text(self.description)
        shown = [("to begin with", self._first)]
        for group in self._action_groups:
            others = [action for action in group._group_actions if action not in self._first]
            shown.append((group.title, others))
        for title, actions in shown:
            formatter.start_section(title)
            formatter.add_arguments(actions)
            formatter.end_section()
            if actions is self._first:
                formatter.add_text(self.epilog)
        return formatter.format_help()

    def parse_known_args(self, args=None, namespace=None):
        words = sys.argv[1:] if args is None else args
        return super().parse_known_args([self._spelled(word) for word in words], namespace)

    def error(self, message):
        raise ValueError(f"{message[0].upper()}{message[1:]}; {self.prog} --help lists the flags.")

    def _spelled(self, word: str) -> str:
        flag = f"--{flag_of(word)}"
        if flag in self._option_string_actions and word[len(flag) :] == "=--":
            # argparse would drop the value.
            self.error(f"argument {flag}: '--' is not a value")
        return flag + word[len(flag) :] if flag in self._option_string_actions else word


def _add_flag(place, field: Field) -> None:
    """Add the flag of a field, and its `--no_` form if it is a switch that is on."""
    kind, options = field.type, dict(field.metadata)
    inner = [part for part in get_args(kind) if part is not NoneType]
    if get_origin(kind) is not Literal and get_origin(kind) is not list and inner:
        # `int | None`; of `list | str | None` one value is a `str`.
        kind = inner[-1]
    if field.default is not MISSING:
        options["default"] = field.default
    else:
        options["required"] = True
    off = None
    if get_origin(kind) is Literal:
        choices = get_args(kind)
        options |= {"choices": choices, "type": str}
    elif kind is bool:
        options["type"] = read_switch
        # A switch that may be unset has a value always.
        if field.type is bool:
            options |= {"nargs": "?", "const": True}
            off = field.metadata if field.default else None
    elif get_origin(kind) is list:
        options |= {"type": get_args(kind)[0], "nargs": "+"}
    else:
        options["type"] = kind
    if "choices" not in options:
        options.setdefault("metavar", {int: "N", float: "X"}.get(options["type"], "VALUE"))
    place.add_argument(f"--{field.name}", **options)
    if off is not None:
        place.add_argument(f"--no_{field.name}", action="store_false", dest=field.name, default=False, **off)


def flag_of(word: str) -> str:
    """`some_flag` for the words `--some_flag`, `--some-flag` and `--some_flag=value`; empty for others."""
    return word[2:].partition("=")[0].replace("-", "_") if word.startswith("--") else ""


def nearest(name: str, known, most: int = 1) -> str:
    """'; did you mean X?' with at most `most` known names close to a wrong one; '' if none is close."""
    dashes = "--" if name.startswith("--") else ""
    name = name.removeprefix(dashes)
    known = [other.removeprefix(dashes) for other in known]
    usual = _our_name(name, known)
    if usual is None:
        matches = difflib.get_close_matches(name, known, n=most, cutoff=0.6)
    else:
        matches = [usual] if usual else []
    if not matches:
        return ""
    return f"; did you mean {dashes}{f' or {dashes}'.join(matches)}?"


def _our_name(name: str, known: list[str]) -> str | None:
    """The one of `known` that other programs call `name`; '' if `known` lacks it, None if no program uses `name`."""
    if name.lower() not in _OURS:
        return None
    for ours in _OURS[name.lower()]:
        shown = f"config_overrides {ours}" if ours.endswith("=N") else ours
        if shown.split()[0] in known and shown != name:
            return shown
    return ""


def named_flags(parser: Parser, words: list[str], flags: Collection[str]) -> set[str]:
    """Names of the flags among `words`; ValueError for one that does not exist."""
    namespace, unknown = parser.parse_known_args(words)
    for word in unknown:
        flag = word.split("=")[0]
        if flag.startswith("-"):
            known = [f"--{name}" for name in flags]
            hint = nearest(flag.replace("-", "_").replace("__", "--", 1), known)
            raise ValueError(f"There is no flag {flag}{hint or f'; {parser.prog} --help lists the flags.'}")
        flags_before = list(filter(None, map(flag_of, words[: words.index(word)])))
        if flags_before and os.path.exists(word):
            raise ValueError(
                f"--{flags_before[-1]} takes one value, and {word!r} is another: if the shell has expanded a pattern, "
                f"quote the pattern (--{flags_before[-1]} '*.txt')."
            )
        instead = "--prompt" if "prompt" in flags else "--flag"
        recipe = "" if "prompt" in flags else ", or a YAML file as the first argument"
        raise ValueError(f"Unexpected argument {word!r}: write {instead} {word}{recipe}.")
    named = set()
    for word in words:
        name = flag_of(word)
        if name:
            named.add(name if name in flags else name.removeprefix("no_"))
    return named
