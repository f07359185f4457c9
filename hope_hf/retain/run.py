"""The command line: `hope-hf retain MODEL --train_file FILE --output_dir DIR`."""

import sys
from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from hope_hf.common.files import require_new
from hope_hf.common.flags import (
    DEVICE,
    LONGEST,
    SEED,
    Bounds,
    Checked,
    ModelArguments,
    check_output,
    parse_numbers,
    require_local,
)
from hope_hf.common.parser import Parser
from hope_hf.common.program import importing, program
from hope_hf.data import named_files

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hope_hf import HopeConfig

# All are held in memory.
MOST_TEXTS = 1000
# Positions behind a text that questions take.
ROOM_OF_QUESTIONS = 64
_CHARACTERS_OF_TOKEN = 16


def make_parser() -> Parser:
    """All flags."""
    parser = Parser(
        (),
        prog="hope-hf retain",
        description="Let layers with a window retain the older tokens that questions will look up.",
        example="hope-hf retain models/smol --train_file novel.txt --output_dir models/smol-retain",
        link="docs/retain.md",
        allow_abbrev=False,
    )
    add = partial(parser.add_argument, action=Checked)
    model = "folder or Hub name of a HOPE with windows (hope-hf convert --sliding_window)"
    add("model", metavar="MODEL", help=model)
    file = "English prose; made-up facts are put between its paragraphs"
    add("--train_file", metavar="FILE", required=True, help=file)
    add("--output_dir", metavar="DIR", required=True, help="a new folder for the model")
    tokens = "tokens that a head of keys retains, on average over heads and layers (default: %(default)s)"
    add("--retained_tokens", metavar="N", type=int, default=512, bounds=Bounds(least=1, most=LONGEST), help=tokens)
    layers = "layers that retain tokens (default: the third of those with windows that lacks most)"
    add("--layers", metavar="N,N", help=layers)
    texts = "training texts (default: %(default)s)"
    add("--texts", metavar="N", type=int, default=12, bounds=Bounds(least=1, most=MOST_TEXTS), help=texts)
    length = "tokens of a training text (default: %(default)s)"
    add("--block_size", metavar="N", type=int, default=4096, bounds=Bounds(least=256, most=LONGEST), help=length)
    seed = "of texts and scores (default: %(default)s)"
    add("--seed", metavar="N", type=int, default=0, bounds=Bounds(**SEED), help=seed)
    add("--device", metavar="NAME", help=DEVICE)
    return parser


@program
def main(argv: list[str]) -> int:
    """Returns 0, or 2 after a mistake of the user."""
    options = make_parser().parse_args(argv)
    check_output(options.output_dir, "--output_dir")
    require_local(options.model, "MODEL")
    out = Path(options.output_dir)
    require_new(out, "--output_dir")
    named_files(options.train_file, "--train_file")
    # Not at the top: flags are read and files are looked for without torch, which takes seconds to be imported.
    with importing():
        import torch
        import transformers

        from hope_hf.common.devices import choose_device, set_up_cpu
        from hope_hf.common.models import is_hope, load_config
        from hope_hf.common.weights import load_model
        from hope_hf.data import check_vocabulary, load_tokenizer

        from .folder import read_prose, save
        from .model import layers_with_windows, learn_to_retain, retaining_layers
        from .texts import AskedTexts

    set_up_cpu(None)
    if not sys.stderr.isatty():
        transformers.utils.logging.disable_progress_bar()
    named = f"MODEL {options.model}"
    config = load_config(options.model, "MODEL", ModelArguments())
    if not is_hope(config):
        raise ValueError(f"{named} is a {config.model_type}: hope-hf convert makes a HOPE of a pretrained model.")
    try:
        candidates = layers_with_windows(config)
    except ValueError as error:
        raise ValueError(f"{named} {error}.") from None
    layers = _layers(options, candidates)
    _check_lengths(options, config)
    device = choose_device(options.device)
    tokenizer = load_tokenizer(options.model)
    check_vocabulary(tokenizer, config.vocab_size)
    prose = read_prose(options.train_file)
    _check_prose(prose, tokenizer, options)
    model = load_model(options.model, config, named).to(device).requires_grad_(False)
    torch.manual_seed(options.seed)
    source = AskedTexts(tokenizer, prose, options.block_size, options.seed)
    texts = [source.make() for _ in range(options.texts)]
    retaining = learn_to_retain(model, texts, options.retained_tokens, layers)
    save(retaining, tokenizer, options.model, out)
    _report(retaining.config, retaining_layers(retaining.config), options)
    return 0


def _layers(options: Namespace, candidates: list[int]) -> list[int] | None:
    """The layers of `--layers` in order."""
    layers = sorted(parse_numbers(options.layers, "--layers", least=0))
    for layer in layers:
        if layer not in candidates:
            raise ValueError(
                f"--layers has {layer}, and the layers of MODEL {options.model} with a window are "
                f"{', '.join(map(str, candidates))}: name some of these."
            )
    return layers or None


def _check_prose(prose: str, tokenizer: "PreTrainedTokenizerBase", options: Namespace) -> None:
    """ValueError unless the prose fills one text: a shorter one would repeat it, and teach little but facts."""
    from hope_hf.data import plain_ids

    # Few tokens have so many characters, and a novel is not encoded twice.
    beginning = prose[: _CHARACTERS_OF_TOKEN * options.block_size]
    tokens = len(plain_ids(tokenizer, beginning))
    if tokens < options.block_size:
        raise ValueError(
            f"--train_file {options.train_file} has {tokens:,} tokens, and one text has {options.block_size:,} "
            "(--block_size): give more prose."
        )


def _check_lengths(options: Namespace, config: "HopeConfig") -> None:
    """ValueError unless texts are longer than the window, and the model knows their positions."""
    shortest = config.attention_sinks + 2 * config.sliding_window
    if options.block_size < shortest:
        raise ValueError(
            f"--block_size is {options.block_size}, and questions look beyond a window of {config.sliding_window} "
            f"tokens: give {shortest} or more."
        )
    longest = config.max_position_embeddings - ROOM_OF_QUESTIONS
    if options.block_size > longest:
        raise ValueError(
            f"--block_size is {options.block_size}, and MODEL {options.model} knows "
            f"{config.max_position_embeddings} positions: give at most {longest}."
        )


def _report(config: "HopeConfig", layers: list[int], options: Namespace) -> None:
    """What was written, and how many tokens each head of these layers retains."""
    for layer, counts in zip(layers, config.retained_tokens, strict=True):
        print(f"layer {layer} retains {', '.join(f'{count:,}' for count in counts)} tokens a head")
    print(
        f"{options.output_dir} is complete: {len(layers)} of {config.num_hidden_layers} layers retain tokens. Measure "
        f"what it remembers: hope-hf eval {options.output_dir} --suite recall --validation_file FILE"
    )
