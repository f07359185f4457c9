"""What defines a run's data; the fields are named as the flags of `hope-hf train`."""

from dataclasses import dataclass
from typing import Literal

from hope_hf.common.flags import TEXT_SOURCES, TextArguments

from .file_names import named_files
from .manifest_name import require_shards
from .mixture import read_mixture
from .sizes import DEFAULT_VOCAB_SIZE


@dataclass
class DataConfig(TextArguments):
    """Text, tokenizer and batches of a run. Without any text: the built-in corpus."""

    shuffle_buffer_size: int = 10_000
    """Documents of a stream that are shuffled together; 1 keeps its order, as does the boundary `carry`."""
    tokenizer_name: str | None = None
    """Folder or Hub name. Without it a byte-level BPE is trained on the training documents, of `vocab_size` or
    `default_vocab_size` entries; a Hub data set always needs one."""
    saved_tokenizer: str | None = None
    """The folder of a checkpoint, whose tokenizer stands for one that would be trained on the documents."""
    trust_remote_code: bool = False
    vocab_size: int | None = None
    """Entries of the model's embedding, if already fixed: the tokenizer must fit."""
    default_vocab_size: int = DEFAULT_VOCAB_SIZE
    """Entries of a tokenizer made from the text if the embedding is not fixed."""

    block_size: int = 1024
    """Tokens per row."""
    per_device_train_batch_size: int = 8
    """Rows per rank and batch, in training and in validation."""
    assistant_only_loss: bool = False
    """The text is chats, of which the assistant's turns are learned; see `hope_hf.data.chats`."""
    long_chats: Literal["keep", "cut", "drop"] = "keep"
    """What happens to chats of more than `block_size` tokens; see `hope_hf.data.chats.shortened`."""
    document_boundary: Literal["reset", "carry"] = "reset"
    seed: int = 42
    dataloader_num_workers: int = 0
    """If above 0, a background thread reads that many batches ahead."""
    dataloader_pin_memory: bool = False

    def __post_init__(self):
        named = [f"--{name}" for name in TEXT_SOURCES if getattr(self, name)]
        if len(named) > 1:
            raise ValueError(f"{' and '.join(named)} name the training text: give only one of them.")
        if self.dataset_config_name and not self.dataset_name:
            raise ValueError("--dataset_config_name needs a --dataset_name: add it.")
        if self.assistant_only_loss and not self.train_file and self.dataset_name in (None, "synthetic"):
            raise ValueError("--assistant_only_loss reads chats: name them with --train_file or --dataset_name.")
        if self.assistant_only_loss and not self.tokenizer_name:
            raise ValueError(
                "--assistant_only_loss teaches a model that knows the language: name it with --model_name_or_path, or "
                "a --tokenizer_name for a new one."
            )
        if self.document_boundary not in ("reset", "carry"):
            raise ValueError(f"--document_boundary is reset or carry, not '{self.document_boundary}'.")
        if self.block_size < 2:
            raise ValueError(f"--block_size must be at least 2, not {self.block_size}: a token predicts the next.")


def require_texts(args) -> None:
    """ValueError that names the flag if files, a mixture or shards that flags name do not exist; no text is read.

    `args` has the fields of `TextArguments`.
    """
    if args.train_file:
        named_files(args.train_file, "--train_file")
    if args.validation_file:
        named_files(args.validation_file, "--validation_file", "validation")
    if args.dataset_mixture:
        read_mixture(args.dataset_mixture, "--dataset_mixture")
    if args.train_shards:
        require_shards(args.train_shards, "--train_shards")
