"""Opens every source of training data: blocks of tokens in an order or a stream of documents, and validation text.

A new source is a flag in `hope_hf.common.flags` and two functions in the table `SOURCES`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path

from datasets import Dataset, IterableDataset, concatenate_datasets
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hope_hf.common.flags import shown_names
from hope_hf.common.process import warn_once

from .chat_template import ChatTemplate, set_chat_template
from .chats import make_chat_encoder, shortened
from .config import DataConfig
from .corpora import Documents, check_cache, held_out_documents, open_corpus, require_as_many, warn_of_excess
from .documents import open_sources, training_source
from .encoding import Encode, document_start, make_encoder
from .files import find_files
from .loader import BlockLoader, Shuffle, StreamLoader
from .mixture import BUILTIN, Corpus, read_mixture
from .order import Mixed, Shuffled
from .packing import Block, CorpusTokens, JoinedBlocks, RandomBlocks, TokenBlocks, TokenStream, stable_seed, tokenize
from .shards import ShardedStream, open_folder
from .text_facts import text_facts
from .vocabulary import DEFAULT_VOCAB_SIZE, check_vocabulary, load_tokenizer, train_tokenizer

_TOKENIZER_BYTES = 32_000_000


@dataclass
class OpenSource:
    """Training and validation data of all ranks, tokenized or about to be."""

    tokenizer: PreTrainedTokenizerBase
    train: Callable[..., BlockLoader | StreamLoader]
    """`train(layout, state=state)`: the loader of one rank, which continues after the state if it is not None."""
    train_tokens: int | None
    """Tokens of one epoch; None for a stream."""
    validation: Sequence[Block]
    identity: tuple
    """What defines the tokens and their order, except block size, boundary and seed."""
    description: str
    """Source and size, for people."""
    former_identity: tuple | None = None
    """`identity` as earlier versions computed it, where it differs."""
    count: Callable[[int], Tensor] | None = None
    """`count(size)`: how often each of `size` tokens is in the training text, int64 [size]; None if not counted."""
    is_text: bool = True
    """False for random tokens, which have no bytes and no documents."""


def open_text(config: DataConfig) -> OpenSource:
    """A data set, files or the built-in corpus; tokenized here, or while training if it is a stream."""
    template = _chat_template(config)
    sources = open_sources(config, template)
    if template is None:
        tokenizer = choose_tokenizer(config, sources.train)
        encoder = make_encoder(tokenizer)
    else:
        tokenizer = template.tokenizer
        encoder = make_chat_encoder(tokenizer)
    held = _of_length(config, tokenize(sources.validation, encoder, config.preprocessing_num_workers))
    if len(held) < 2:
        named, fix = training_source(config), "pass --validation_file"
        if config.validation_file:
            named, fix = f"--validation_file {shown_names(config.validation_file)}", "give a file with text"
        raise ValueError(f"{named} gave no validation text: {fix}.")
    carry = config.document_boundary == "carry"
    if isinstance(sources.train, IterableDataset):
        # Rows that carry their memories to the next batch read a text in its order.
        shuffle = Shuffle(1 if carry else config.shuffle_buffer_size, config.seed)
        options = {"shuffle": shuffle, "source": training_source(config)}
        if config.assistant_only_loss and config.long_chats != "keep":
            encoder = partial(_encoded_of_length, encoder, config.block_size, config.long_chats)
        train = partial(StreamLoader, sources.train, encoder, **options)
        tokens, identity, size, count = None, _stream_identity(config, tokenizer), "streamed", None
        former = _former_stream_identity(config), held.digest()
    else:
        stream = _of_length(config, tokenize(sources.train, encoder, config.preprocessing_num_workers))
        _require_a_block(config, stream)
        blocks = TokenBlocks(stream, config.block_size)
        train = partial(BlockLoader, blocks, Shuffled(len(blocks), config.seed), positions=not carry)
        tokens, identity, size, count = len(stream), stream.digest(), _size(stream), stream.count
        former = None
    return OpenSource(
        tokenizer=tokenizer,
        train=train,
        train_tokens=tokens,
        validation=TokenBlocks(held, config.block_size, keep_last=True),
        identity=(identity, held.digest()),
        former_identity=former,
        description=f"{sources.description}: {size}; validation {_size(held)}",
        count=count,
    )


_LONG = {
    "keep": "go on in the next row, which begins without what came before",
    "cut": "are cut",
    "drop": "are left out",
}


def _of_length(config: DataConfig, stream: TokenStream) -> TokenStream:
    """The chats as `--long_chats` wants them; their number is told. Other text as it is."""
    if not config.assistant_only_loss:
        return stream
    if number := stream.longer_than(config.block_size):
        warn_once(
            f"{number:,} of {len(stream.starts):,} chats are longer than --block_size {config.block_size} and "
            f"{_LONG[config.long_chats]}: --long_chats keep, cut or drop decides."
        )
    if config.long_chats == "keep" or not number:
        return stream
    return stream.changed(partial(shortened, longest=config.block_size, how=config.long_chats))


def _encoded_of_length(encode: Encode, longest: int, how: str, texts: list[str]) -> list[list[int]]:
    return shortened(encode(texts), longest, how)


def _chat_template(config: DataConfig) -> ChatTemplate | None:
    """The template of chats; None for other text."""
    if not config.assistant_only_loss:
        return None
    tokenizer = choose_tokenizer(config, None)
    set_chat_template(tokenizer)
    return ChatTemplate(tokenizer)


def open_synthetic(config: DataConfig) -> OpenSource:
    """Rows of seeded random tokens, for measuring speed. Every row is one document, so no boundary is marked."""
    tokenizer = load_tokenizer(config.tokenizer_name) if config.tokenizer_name else train_tokenizer([], 258)
    vocab_size = config.vocab_size or (len(tokenizer) if config.tokenizer_name else DEFAULT_VOCAB_SIZE)
    check_vocabulary(tokenizer, vocab_size)
    rows, held_rows = config.max_train_samples or 1 << 20, config.max_eval_samples or 32
    blocks = RandomBlocks(rows, config.block_size, vocab_size, stable_seed(config.seed, 0))
    return OpenSource(
        tokenizer=tokenizer,
        train=partial(BlockLoader, blocks, Shuffled(rows, config.seed), positions=False),
        train_tokens=rows * config.block_size,
        validation=RandomBlocks(held_rows, config.block_size, vocab_size, stable_seed(config.seed, 1)),
        identity=("synthetic", rows, vocab_size),
        description=f"synthetic: {rows:,} rows of random tokens below {vocab_size:,}",
        is_text=False,
    )


def open_mixture(config: DataConfig) -> OpenSource:
    """The corpora of `--dataset_mixture`, tokenized here unless they are shards."""
    corpora = read_mixture(config.dataset_mixture, "--dataset_mixture")
    from_hub = any(corpus.dataset_name not in (None, BUILTIN) for corpus in corpora)
    if not config.tokenizer_name and (from_hub or all(corpus.shards for corpus in corpora)):
        raise _needs_tokenizer(f"--dataset_mixture {config.dataset_mixture}")
    tokenizer = choose_tokenizer(config, None) if config.tokenizer_name else None
    share, count = config.validation_split_percentage, config.max_eval_samples
    check_cache(corpora, share, config.seed, tokenizer)
    documents = {
        corpus.name: open_corpus(corpus, share, count, config.seed, tokenizer)
        for corpus in corpora
        if not corpus.shards
    }
    if tokenizer is None:
        tokenizer = choose_tokenizer(config, concatenate_datasets([part.train for part in documents.values()]))
    parts = [
        _tokenized(documents[corpus.name], tokenizer, config.preprocessing_num_workers)
        if corpus.name in documents
        else _sharded(corpus, tokenizer, config)
        for corpus in corpora
    ]
    return _mixed(config, tokenizer, parts, config.dataset_mixture)


def open_shards(config: DataConfig) -> OpenSource:
    """The corpora of a folder of shards, with the weights that they were prepared with."""
    folder = open_folder(config.train_shards, "--train_shards")
    tokenizer = folder.tokenizer(config)
    parts = [replace(corpus, validation=corpus.validation.head(config.max_eval_samples)) for corpus in folder.corpora]
    return _mixed(config, tokenizer, parts, config.train_shards)


def choose_tokenizer(config: DataConfig, documents: Dataset | IterableDataset | None) -> PreTrainedTokenizerBase:
    """The tokenizer of `--tokenizer_name`, or one trained on the documents; it fits the model's vocabulary."""
    if config.tokenizer_name:
        tokenizer = load_tokenizer(config.tokenizer_name, config.trust_remote_code)
    elif config.saved_tokenizer:
        tokenizer = load_tokenizer(config.saved_tokenizer)
    elif config.dataset_name:
        raise _needs_tokenizer(f"--dataset_name {config.dataset_name}")
    else:
        tokenizer = train_tokenizer(_sample(documents), config.vocab_size or config.default_vocab_size)
    if config.vocab_size is not None:
        check_vocabulary(tokenizer, config.vocab_size)
    return tokenizer


def _needs_tokenizer(source: str) -> ValueError:
    return ValueError(f"{source} needs a --tokenizer_name: a folder or Hub name, or one made with hope-hf tokenizer.")


def _sample(documents: Dataset | IterableDataset) -> Iterator[str]:
    """Enough text for a small vocabulary: documents evenly spread over the source (the first ones of a stream)."""
    is_stream = isinstance(documents, IterableDataset)
    stride = 1 if is_stream else max(1, -(-documents.data.nbytes // _TOKENIZER_BYTES))
    budget = _TOKENIZER_BYTES
    for row in islice(documents, 0, None, stride):
        if budget <= 0:
            return
        if row["text"]:
            budget -= len(row["text"])
            yield row["text"][:_TOKENIZER_BYTES]


def _stream_identity(config: DataConfig, tokenizer: PreTrainedTokenizerBase) -> str:
    """A stream is not read to the end, so its flags, its tokenizer, and both ends of its files identify it."""
    names = (
        "dataset_config_name validation_split_percentage max_train_samples shuffle_buffer_size text_column "
        "assistant_only_loss"
    )
    named = [(name, getattr(config, name)) for name in names.split()]
    facts = text_facts(config, tokenizer)
    # A folder is what its files are, in their order; a data set of the Hub is its name.
    what = {flag: [end for *_, end in files] for flag, files in facts.items() if flag != "tokenizer"}
    hub = None if "--dataset_name" in what else config.dataset_name
    return repr((named, hub, what, facts["tokenizer"]))


def _former_stream_identity(config: DataConfig) -> str:
    """As versions before 2026-11-28 had it: flags, and the names and sizes of files."""
    names = (
        "dataset_name dataset_config_name validation_split_percentage max_train_samples shuffle_buffer_size "
        "tokenizer_name"
    )
    named = sorted(((name, getattr(config, name)) for name in names.split()), key=str)
    named += [value for value in (config.text_column, config.assistant_only_loss) if value]
    files = find_files(config.train_file, "--train_file") if config.train_file else []
    return repr((named, [(Path(file).name, Path(file).stat().st_size) for file in files]))


def _require_a_block(config: DataConfig, stream: TokenStream | ShardedStream, text: str = "the training text") -> None:
    if len(stream) < config.block_size:
        fits = 1 << max(1, len(stream).bit_length() - 1)
        raise ValueError(
            f"--block_size {config.block_size} is longer than {text} of {len(stream)} tokens: lower it, such as to "
            f"{fits}, or add text."
        )


def _size(stream: TokenStream) -> str:
    return f"{len(stream.starts):,} documents, {len(stream):,} tokens"


def _mixed(
    config: DataConfig, tokenizer: PreTrainedTokenizerBase, parts: list[CorpusTokens], source: str
) -> OpenSource:
    carry = config.document_boundary == "carry"
    if carry and len(parts) > 1:
        raise ValueError(
            f"--document_boundary carry reads one text from its beginning to its end, and {source} mixes "
            f"{len(parts)}: use --document_boundary reset."
        )
    for part in parts:
        _require_a_block(config, part.train, f"the corpus {part.name}")
    trains = [TokenBlocks(part.train, config.block_size) for part in parts]
    weights = [part.weight for part in parts]
    order = Mixed(list(map(len, trains)), None if None in weights else weights, config.seed)
    held = [TokenBlocks(part.validation, config.block_size, keep_last=True) for part in parts if len(part.validation)]
    if not held:
        raise ValueError(f"{source} gave no validation text: raise --validation_split_percentage.")
    _warn_of_shares(parts, trains, order)
    blocks = JoinedBlocks(trains)
    tokens, held_tokens = len(blocks) * config.block_size, sum(len(part.validation) for part in parts)
    shares = ", ".join(
        f"{part.name} {share / len(order):.1%}" for part, share in zip(parts, order.shares, strict=True)
    )
    return OpenSource(
        tokenizer=tokenizer,
        train=partial(BlockLoader, blocks, order, positions=not carry),
        train_tokens=tokens,
        validation=JoinedBlocks(held),
        identity=tuple((part.train.digest(), part.validation.digest(), part.weight) for part in parts),
        description=f"{source}: {tokens:,} tokens ({shares}); validation {held_tokens:,} tokens",
    )


def _warn_of_shares(parts: list[CorpusTokens], trains: list[TokenBlocks], order: Mixed) -> None:
    """Name the corpora that an epoch reads more than once, and those of which it reads nothing."""
    if unread := [part.name for part, share in zip(parts, order.shares, strict=True) if not share]:
        warn_once(
            f"An epoch of {len(order)} blocks reads nothing of {', '.join(unread)}, whose weight is less than half a "
            "block: give it more, or leave it out."
        )
    times = {
        part.name: share / len(blocks)
        for part, blocks, share in zip(parts, trains, order.shares, strict=True)
        # Rounding a share up to whole blocks is no repetition.
        if share > 1.1 * len(blocks)
    }
    if times:
        listed = ", ".join(f"{name} {count:.1f} times" for name, count in times.items())
        warn_once(f"An epoch of {len(order)} blocks reads {listed}: repeated text teaches the model less.")


def _tokenized(documents: Documents, tokenizer: PreTrainedTokenizerBase, workers: int | None) -> CorpusTokens:
    corpus, encoder = documents.corpus, make_encoder(tokenizer)
    train = tokenize(documents.train, encoder, workers)
    if corpus.max_tokens is not None:
        require_as_many(corpus, "max_tokens", len(train))
        # The document that reaches the limit is read whole.
        train = train.head(int((train.starts < corpus.max_tokens).sum()))
        warn_of_excess(corpus, len(train))
    return CorpusTokens(corpus.name, train, tokenize(documents.validation, encoder, workers), corpus.weight)


def _sharded(corpus: Corpus, tokenizer: PreTrainedTokenizerBase, config: DataConfig) -> CorpusTokens:
    folder = open_folder(corpus.shards, f"corpus {corpus.name}: shards")
    folder.check_tokenizer(tokenizer)
    train = ShardedStream.join([part.train for part in folder.corpora])
    held = ShardedStream.join([part.validation.head(config.max_eval_samples) for part in folder.corpora])
    return CorpusTokens(corpus.name, train, held, corpus.weight)


def _texts_of_text(config: DataConfig) -> tuple[dict[str, list[str]], str]:
    sources = open_sources(config, _chat_template(config))
    return {"text": sources.validation["text"][:]}, sources.description


def _texts_of_mixture(config: DataConfig) -> tuple[dict[str, list[str]], str]:
    found, share, count = {}, config.validation_split_percentage, config.max_eval_samples
    for corpus in read_mixture(config.dataset_mixture, "--dataset_mixture"):
        if corpus.shards:
            parts = _decoded(corpus.shards, f"corpus {corpus.name}: shards", config)
            found[corpus.name] = [text for texts in parts.values() for text in texts]
        else:
            found[corpus.name] = held_out_documents(corpus, share, count, config.seed)["text"][:]
    return found, config.dataset_mixture


def _decoded(path: str, flag: str, config: DataConfig) -> dict[str, list[str]]:
    """The validation documents of each corpus in a folder of shards."""
    folder = open_folder(path, flag)
    # The shards' own tokenizer decodes, whatever tokenizer the model has.
    tokenizer = folder.tokenizer(DataConfig(trust_remote_code=config.trust_remote_code))
    # A document's text lies between the token that begins it and EOS, which may be the one that begins the next.
    end = None if document_start(tokenizer) == tokenizer.eos_token_id else -1
    found = {}
    for corpus in folder.corpora:
        stream = corpus.validation.head(config.max_eval_samples)
        whole = stream.block(0, len(stream))
        documents = whole.tokens.tensor_split(whole.starts[1:])
        found[corpus.name] = [
            tokenizer.decode(document[1:end], clean_up_tokenization_spaces=False) for document in documents
        ]
    return found


@dataclass(frozen=True)
class Source:
    """One kind of text."""

    open: Callable[[DataConfig], OpenSource]
    texts: Callable[[DataConfig], tuple[dict[str, list[str]], str]]
    """See `validation_texts`."""


SOURCES = {
    "train_shards": Source(
        open_shards, lambda config: (_decoded(config.train_shards, "--train_shards", config), config.train_shards)
    ),
    "dataset_mixture": Source(open_mixture, _texts_of_mixture),
}
"""By the flag that names the text; all other text is a data set, files or the built-in corpus."""
_TEXT = Source(open_text, _texts_of_text)


def open_source(config: DataConfig) -> OpenSource:
    """Open what the flags name. Raises ValueError that names the flag or file."""
    return open_synthetic(config) if config.dataset_name == "synthetic" else _source(config).open(config)


def validation_texts(config: DataConfig) -> tuple[dict[str, list[str]], str]:
    """The held-out documents of each corpus, and a description of the source for people.

    Text without a mixture is one corpus, called `text`. Tokens of shards are decoded. The first
    `max_eval_samples` documents of each corpus are read. Raises ValueError that names the flag or file.
    """
    return _source(config).texts(config)


def _source(config: DataConfig) -> Source:
    return next((source for flag, source in SOURCES.items() if getattr(config, flag)), _TEXT)
