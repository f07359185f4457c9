"""What `hope-hf chat MODEL` and `hope-hf generate MODEL` do: they load a model in one way."""

import io
import sys
from contextlib import AbstractContextManager, nullcontext

import torch
import transformers

from hope_hf import HopeCache, LevelLearning
from hope_hf.common.devices import choose_device, set_up_cpu
from hope_hf.common.flags import ModelArguments
from hope_hf.common.models import is_hope, load_config
from hope_hf.common.weights import load_model
from hope_hf.data import check_vocabulary, load_tokenizer, warn_of_other_tokenizer

from .conversation import Conversation, Transcript
from .flags import DRAWS, Arguments, GenerateArguments
from .memory import Memory
from .session import Session


def hold(args: Arguments, texts: dict[str, str]) -> None:
    """Read the texts, by the names of their files, and answer messages until the input ends."""
    with _memory(args) as memory:
        Session(begin(args, memory), args, memory).run(texts)


def continue_text(args: GenerateArguments) -> None:
    """Continue the text of `--prompt`, or of standard input."""
    with _memory(args) as memory:
        conversation = begin(args, memory)
        conversation.complete(sys.stdin.read().removesuffix("\n") if args.prompt is None else args.prompt)
        print(f"{conversation.last}; state {conversation.state_size}", file=sys.stderr, flush=True)
        if memory is not None:
            memory.save(conversation)


def _memory(args: Arguments | GenerateArguments) -> AbstractContextManager[Memory | None]:
    """The folder of `--memory`, held until the program ends, and before it reads for an hour."""
    return nullcontext() if args.memory is None else Memory(args.memory, args.memory_dtype).locked()


def begin(args: Arguments | GenerateArguments, memory: Memory | None) -> Conversation:
    """The conversation of the flags; ValueError if model, tokenizer or memory do not load."""
    named = f"MODEL {args.model}"
    config = load_config(args.model, "MODEL", ModelArguments())
    if not is_hope(config):
        raise ValueError(f"{named} is a {config.model_type}: hope-hf convert makes a HOPE of a pretrained model.")
    device = choose_device(args.device)
    set_up_cpu(args.cpu_threads)
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    if not sys.stderr.isatty():
        transformers.utils.logging.disable_progress_bar()
    tokenizer = load_tokenizer(args.tokenizer_name or args.model)
    check_vocabulary(tokenizer, config.vocab_size)
    if args.tokenizer_name:
        warn_of_other_tokenizer(tokenizer, args.model)
    dtype = args.dtype if args.dtype == "auto" else getattr(torch, args.dtype)
    model = load_model(args.model, config, named, dtype=dtype)
    model = model.to(device).eval()
    if model.config.level_learning is None:
        # a memory may hold what they have learned, also without --learn
        model.config.level_learning = LevelLearning()
        if args.learn:
            say = f"{named} has no fields of learning: its levels learn with the defaults, which docs/levels.md lists."
            print(say, file=sys.stderr, flush=True)
    cache, transcript = (None, Transcript()) if memory is None else memory.load(model)
    if cache is None:
        cache = HopeCache(config)
    if not args.archive:
        if cache.archive.holds_tokens:
            dropped = f"--no_archive drops the words of what was read from {args.memory}: --recall cannot search them."
            print(dropped, file=sys.stderr, flush=True)
        cache.archive.stop()
    recalls = getattr(args, "recall", False)
    if recalls and cache.get_seq_length() and not cache.archive.holds_tokens:
        print(
            f"--recall: {args.memory} does not hold the words of what was read: read the files again to search them.",
            file=sys.stderr,
            flush=True,
        )
    torch.manual_seed(args.seed)
    return Conversation(
        model,
        tokenizer,
        cache,
        transcript,
        learn=args.learn,
        learn_generated=args.learn_generated,
        recall=recalls,
        max_new_tokens=args.max_new_tokens,
        **_sampling(args),
    )


def _sampling(args: Arguments | GenerateArguments) -> dict:
    """Arguments of `generate`; what is not given is what the model's folder says."""
    options = {}
    for name in ("do_sample", "repetition_penalty", *DRAWS):
        value = getattr(args, name)
        if value is not None:
            options[name] = value
    if DRAWS & options.keys():
        options.setdefault("do_sample", True)
    return options
