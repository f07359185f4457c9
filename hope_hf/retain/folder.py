"""Prose that is read, and the folder of a model that retains tokens."""

from pathlib import Path

from huggingface_hub import ModelCard, ModelCardData
from transformers import PreTrainedTokenizerBase

from hope_hf import HopeConfig, HopeForCausalLM
from hope_hf.common.files import new_folder, share_weights
from hope_hf.common.models import card_metadata
from hope_hf.data import find_files, load_files

from .model import retaining_layers

# Characters of prose that are read: more than training texts take.
_MOST_PROSE = 20_000_000


def read_prose(file: str) -> str:
    """The text of a file, its documents apart as paragraphs are. ValueError names `--train_file`."""
    documents = []
    length = 0
    for document in load_files(find_files(file, "--train_file"), "--train_file")["text"]:
        documents.append(document or "")
        length += len(documents[-1])
        if length > _MOST_PROSE:
            break
    if not any(document.strip() for document in documents):
        raise ValueError(f"--train_file {file} holds no text: name a file with English prose.")
    return "\n\n".join(documents)


def save(model: HopeForCausalLM, tokenizer: PreTrainedTokenizerBase, source: str, out: Path) -> None:
    """Write the model with its tokenizer and a card; `out` appears complete, or not at all."""
    with new_folder(out, "--output_dir") as folder:
        model.save_pretrained(folder)
        share_weights(folder)
        tokenizer.save_pretrained(folder)
        _card(model.config, source).save(folder / "README.md")


def _card(config: HopeConfig, source: str) -> ModelCard:
    """A page for people, under the metadata of the source's card."""
    metadata = card_metadata(Path(source) / "README.md")
    fields = metadata.to_dict() | {"library_name": "transformers", "pipeline_tag": "text-generation"}
    tags = fields.get("tags") or ()
    fields["tags"] = sorted({"hope", "nested-learning", *tags})
    layers = map(str, retaining_layers(config))
    counts = sum(config.retained_tokens, start=[])
    page = f"""\
The model `{Path(source).name}` with the same weights, as a HOPE language model (*Nested Learning*,
[arXiv 2512.24695](https://arxiv.org/abs/2512.24695)) that retains tokens.

Layers {", ".join(layers)} see the last {config.sliding_window:,} tokens, the first {config.attention_sinks}, and older
tokens that they retain: {sum(counts) / len(counts):,.0f} a head of keys on average, from {min(counts):,} to
{max(counts):,}. Small maps, which were fitted to questions about made-up facts, choose them. The state of a text has
the same size however long the text is.

## Use

```python
import hope_hf
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{Path(source).name}")
```
"""
    return ModelCard(f"---\n{ModelCardData(**fields).to_yaml()}\n---\n\n{page}")
