"""The text that a run holds out, as text: what an evaluation reads."""

from transformers import PreTrainedTokenizerBase

from .config import DataConfig
from .corpora import held_out_documents
from .encoding import document_start
from .mixture import read_mixture
from .shards import ShardedCorpus, open_folder
from .sources import open_sources


def validation_texts(config: DataConfig) -> tuple[dict[str, list[str]], str]:
    """The held-out documents of each corpus, and where they come from, for people.

    Text that is not of a mixture is one corpus, called `text`. Of shards it is what their tokens say. The first
    `max_eval_samples` documents of each corpus are read. Raises ValueError that names the flag or file.
    """
    if config.train_shards:
        return _of_shards(config.train_shards, "--train_shards", config), config.train_shards
    if config.dataset_mixture:
        return _of_mixture(config), config.dataset_mixture
    sources = open_sources(config)
    return {"text": sources.validation["text"][:]}, sources.description


def _of_mixture(config: DataConfig) -> dict[str, list[str]]:
    found = {}
    for corpus in read_mixture(config.dataset_mixture, "--dataset_mixture"):
        if corpus.shards:
            parts = _of_shards(corpus.shards, f"corpus {corpus.name}: shards", config)
            found[corpus.name] = [text for texts in parts.values() for text in texts]
        else:
            share, count = config.validation_split_percentage, config.max_eval_samples
            found[corpus.name] = held_out_documents(corpus, share, count, config.seed)["text"][:]
    return found


def _of_shards(path: str, flag: str, config: DataConfig) -> dict[str, list[str]]:
    folder = open_folder(path, flag)
    # The shards' own, whatever the tokenizer of the model that reads the text.
    tokenizer = folder.tokenizer(DataConfig(trust_remote_code=config.trust_remote_code))
    return {corpus.name: _decoded(corpus, config.max_eval_samples, tokenizer) for corpus in folder.corpora}


def _decoded(corpus: ShardedCorpus, count: int | None, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    stream = corpus.validation.head(count)
    whole = stream.block(0, len(stream))
    # A document's text lies between the token that begins it and EOS, which may be the one that begins the next.
    end = None if document_start(tokenizer) == tokenizer.eos_token_id else -1
    documents = whole.tokens.tensor_split(whole.starts[1:])
    return [tokenizer.decode(document[1:end], clean_up_tokenization_spaces=False) for document in documents]
