"""Opens every source of training data: blocks of tokens in an order or a stream of documents, and validation text.

A new source is a flag in `hope_hf.common.flags` and two functions in the table `SOURCES`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice

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
from .loader import BlockLoader, Shuffle, StreamLoader
from .mixture import BUILTIN, Corpus, read_mixture
from .order import Mixed, Shuffled
from .packing import Block, CorpusTokens, JoinedBlocks, RandomBlocks, TokenBlocks, TokenStream, stable_seed, tokenize
from .shards import ShardedStream, open_folder
from .sizes import DEFAULT_VOCAB_SIZE
from .text_facts import text_facts
from .vocabulary import check_vocabulary, load_tokenizer, train_tokenizer

_TOKENIZER_BYTES = 32_000_000
# Flags that decide which tokens a stream gives.
_FLAGS_OF_A_STREAM = (
    "dataset_config_name", "validation_split_percentage", "max_train_samples", "shuffle_buffer_size", "text_column",
    "assistant_only_loss",
)  # fmt: skip


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
        if config.validation_file:
            raise ValueError(
                f"--validation_file {shown_names(config.validation_file)} gave no validation text: give a file with "
                "text."
            )
        raise ValueError(f"{training_source(config)} gave no validation text: pass --validation_file.")
    source = OpenSource(
        tokenizer=tokenizer,
        train=None,
        train_tokens=None,
        validation=TokenBlocks(held, config.block_size, keep_last=True),
        identity=(),
        description=sources.description,
    )
    if isinstance(sources.train, IterableDataset):
        source.train = _stream_loader(config, sources.train, encoder)
        source.identity = (_stream_identity(config, tokenizer), held.digest())
        size = "streamed"
    else:
        stream = _of_length(config, tokenize(sources.train, encoder, config.preprocessing_num_workers))
        _require_a_block(config, stream, "the training text")
        blocks = TokenBlocks(stream, config.block_size)
        order = Shuffled(len(blocks), config.seed)
        source.train = partial(BlockLoader, blocks, order, positions=config.document_boundary != "carry")
        source.train_tokens = len(stream)
        source.identity = (stream.digest(), held.digest())
        source.count = stream.count
        size = _size(stream)
    source.description += f": {size}; validation {_size(held)}"
    return source


def _stream_loader(config: DataConfig, documents: IterableDataset, encoder: Encode) -> Callable[..., StreamLoader]:
    # Rows that carry their memories to the next batch read a text in its order.
    buffer_size = 1 if config.document_boundary == "carry" else config.shuffle_buffer_size
    if config.assistant_only_loss and config.long_chats != "keep":
        encoder = partial(_encoded_of_length, encoder, config.block_size, config.long_chats)
    shuffle = Shuffle(buffer_size, config.seed)
    return partial(StreamLoader, documents, encoder, shuffle=shuffle, source=training_source(config))


_LONG_CHATS = {
    "keep": "go on in the next row, which begins without what came before",
    "cut": "are cut",
    "drop": "are left out",
}


def _of_length(config: DataConfig, stream: TokenStream) -> TokenStream:
    """The chats as `--long_chats` says, with a warning of their number. Other text as it is."""
    if not config.assistant_only_loss:
        return stream
    number = stream.longer_than(config.block_size)
    if not number:
        return stream
    warn_once(
        f"{number:,} of {len(stream.starts):,} chats are longer than --block_size {config.block_size} and "
        f"{_LONG_CHATS[config.long_chats]}: --long_chats keep, cut or drop decides."
    )
    if config.long_chats == "keep":
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
    template = ChatTemplate(tokenizer)
    if "strftime_now" in template.source:
        warn_once(
            "The tokenizer's chat template writes the present day into chats, so a run on another day reads other "
            "tokens: write a day of your own into its chat_template.jinja."
        )
    return template


def open_synthetic(config: DataConfig) -> OpenSource:
    """Rows of seeded random tokens, for measuring speed. Every row is one document, so no boundary is marked."""
    if config.tokenizer_name:
        tokenizer = load_tokenizer(config.tokenizer_name)
        vocab_size = config.vocab_size or len(tokenizer)
    else:
        tokenizer = train_tokenizer([], 258)
        vocab_size = config.vocab_size or DEFAULT_VOCAB_SIZE
    check_vocabulary(tokenizer, vocab_size)
    rows = config.max_train_samples or 1 << 20
    held_rows = config.max_eval_samples or 32
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
    texts = [corpus for corpus in corpora if not corpus.shards]
    tokenizer = None
    if config.tokenizer_name:
        tokenizer = choose_tokenizer(config, None)
    elif not texts or any(corpus.dataset_name not in (None, BUILTIN) for corpus in texts):
        raise _needs_tokenizer(f"--dataset_mixture {config.dataset_mixture}")
    percentage = config.validation_split_percentage
    check_cache(corpora, percentage, config.seed, tokenizer)
    documents = {}
    for corpus in texts:
        documents[corpus.name] = open_corpus(corpus, percentage, config.max_eval_samples, config.seed, tokenizer)
    if tokenizer is None:
        training_texts = concatenate_datasets([part.train for part in documents.values()])
        tokenizer = choose_tokenizer(config, training_texts)
    parts = []
    for corpus in corpora:
        if corpus.shards:
            parts.append(_sharded(corpus, tokenizer, config))
        else:
            parts.append(_tokenized(documents[corpus.name], tokenizer, config.preprocessing_num_workers))
    return _mixed(config, tokenizer, parts, config.dataset_mixture)


def open_shards(config: DataConfig) -> OpenSource:
    """The corpora of a folder of shards, with the weights that they were prepared with."""
    folder = open_folder(config.train_shards, "--train_shards")
    tokenizer = folder.tokenizer(config)
    parts = []
    for corpus in folder.corpora:
        parts.append(replace(corpus, validation=corpus.validation.head(config.max_eval_samples)))
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
    stride = 1
    if isinstance(documents, Dataset):
        stride = max(1, -(-documents.data.nbytes // _TOKENIZER_BYTES))
    budget = _TOKENIZER_BYTES
    for row in islice(documents, 0, None, stride):
        if budget <= 0:
            return
        if row["text"]:
            budget -= len(row["text"])
            yield row["text"][:_TOKENIZER_BYTES]


def _stream_identity(config: DataConfig, tokenizer: PreTrainedTokenizerBase) -> str:
    """A stream is not read to the end, so its flags, its tokenizer, and both ends of its files identify it."""
    flags = [(name, getattr(config, name)) for name in _FLAGS_OF_A_STREAM]
    facts = text_facts(config, tokenizer)
    tokenizer_hash = facts.pop("tokenizer")
    # A folder is what its files are, in their order; a data set of the Hub is its name.
    hashes = {}
    for flag, files in facts.items():
        hashes[flag] = [content_hash for _, _, content_hash in files]
    hub_name = None if "--dataset_name" in hashes else config.dataset_name
    return repr((flags, hub_name, hashes, tokenizer_hash))


def _require_a_block(config: DataConfig, stream: TokenStream | ShardedStream, text: str) -> None:
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
    trains = []
    held = []
    for part in parts:
        _require_a_block(config, part.train, f"the corpus {part.name}")
        trains.append(TokenBlocks(part.train, config.block_size))
        if len(part.validation):
            held.append(TokenBlocks(part.validation, config.block_size, keep_last=True))
    if not held:
        raise ValueError(f"{source} gave no validation text: raise --validation_split_percentage.")
    weights = [part.weight for part in parts]
    if None in weights:
        weights = None
    order = Mixed(list(map(len, trains)), weights, config.seed)
    names = [part.name for part in parts]
    _warn_of_shares(names, trains, order)
    blocks = JoinedBlocks(trains)
    tokens = len(blocks) * config.block_size
    held_tokens = sum(len(part.validation) for part in parts)
    shares = []
    for name, places in zip(names, order.shares, strict=True):
        shares.append(f"{name} {places / len(order):.1%}")
    return OpenSource(
        tokenizer=tokenizer,
        train=partial(BlockLoader, blocks, order, positions=not carry),
        train_tokens=tokens,
        validation=JoinedBlocks(held),
        identity=tuple((part.train.digest(), part.validation.digest(), part.weight) for part in parts),
        description=f"{source}: {tokens:,} tokens ({', '.join(shares)}); validation {held_tokens:,} tokens",
    )


def _warn_of_shares(names: list[str], trains: list[TokenBlocks], order: Mixed) -> None:
    """Name the corpora that an epoch reads more than once, and those of which it reads nothing."""
    unread = []
    repeated = []
    for name, blocks, share in zip(names, trains, order.shares, strict=True):
        if share == 0:
            unread.append(name)
        # Rounding a share up to whole blocks is no repetition.
        elif share > 1.1 * len(blocks):
            repeated.append(f"{name} {share / len(blocks):.1f} times")
    if unread:
        warn_once(
            f"An epoch of {len(order):,} blocks reads nothing of {', '.join(unread)}, whose weight is less than half "
            "a block: give it more, or leave it out."
        )
    if repeated:
        warn_once(
            f"An epoch of {len(order):,} blocks reads {', '.join(repeated)}: repeated text teaches the model less."
        )


def _tokenized(documents: Documents, tokenizer: PreTrainedTokenizerBase, workers: int | None) -> CorpusTokens:
    corpus = documents.corpus
    encoder = make_encoder(tokenizer)
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
    train = []
    held = []
    for part in folder.corpora:
        train.append(part.train)
        held.append(part.validation.head(config.max_eval_samples))
    return CorpusTokens(corpus.name, ShardedStream.join(train), ShardedStream.join(held), corpus.weight)


def _texts_of_text(config: DataConfig) -> tuple[dict[str, list[str]], str]:
    sources = open_sources(config, _chat_template(config))
    return {"text": sources.validation["text"][:]}, sources.description


def _texts_of_mixture(config: DataConfig) -> tuple[dict[str, list[str]], str]:
    texts = {}
    for corpus in read_mixture(config.dataset_mixture, "--dataset_mixture"):
        if corpus.shards:
            decoded = _decoded(corpus.shards, f"corpus {corpus.name}: shards", config)
            texts[corpus.name] = sum(decoded.values(), [])
        else:
            held = held_out_documents(corpus, config.validation_split_percentage, config.max_eval_samples, config.seed)
            texts[corpus.name] = held["text"][:]
    return texts, config.dataset_mixture


def _texts_of_shards(config: DataConfig) -> tuple[dict[str, list[str]], str]:
    return _decoded(config.train_shards, "--train_shards", config), config.train_shards


def _decoded(path: str, flag: str, config: DataConfig) -> dict[str, list[str]]:
    """The validation documents of each corpus in a folder of shards."""
    folder = open_folder(path, flag)
    # The shards' own tokenizer decodes, whatever tokenizer the model has.
    tokenizer = folder.tokenizer(DataConfig(trust_remote_code=config.trust_remote_code))
    # A document's text lies between the token that begins it and EOS, which may be the one that begins the next.
    end = None if document_start(tokenizer) == tokenizer.eos_token_id else -1
    texts = {}
    for corpus in folder.corpora:
        stream = corpus.validation.head(config.max_eval_samples)
        whole = stream.block(0, len(stream))
        texts[corpus.name] = []
        for document in whole.tokens.tensor_split(whole.starts[1:]):
            text = tokenizer.decode(document[1:end], clean_up_tokenization_spaces=False)
            texts[corpus.name].append(text)
    return texts


@dataclass(frozen=True)
class Source:
    """One kind of text."""

    open: Callable[[DataConfig], OpenSource]
    texts: Callable[[DataConfig], tuple[dict[str, list[str]], str]]
    """See `validation_texts`."""


SOURCES = {
    "train_shards": Source(open_shards, _texts_of_shards),
    "dataset_mixture": Source(open_mixture, _texts_of_mixture),
}
"""By the flag that names the text; all other text is a data set, files or the built-in corpus."""
_TEXT = Source(open_text, _texts_of_text)


def open_source(config: DataConfig) -> OpenSource:
    """Open what the flags name. Raises ValueError that names the flag or file."""
    if config.dataset_name == "synthetic":
        return open_synthetic(config)
    return _source(config).open(config)


def validation_texts(config: DataConfig) -> tuple[dict[str, list[str]], str]:
    """The held-out documents of each corpus, and a description of the source for people.

    Text without a mixture is one corpus, called `text`. Tokens of shards are decoded. The first
    `max_eval_samples` documents of each corpus are read. Raises ValueError that names the flag or file.
    """
    return _source(config).texts(config)


def _source(config: DataConfig) -> Source:
    for flag, source in SOURCES.items():
        if getattr(config, flag):
            return source
    return _TEXT
