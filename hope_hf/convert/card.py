"""The model card of a converted model: its source, that source's licence, and how the two compare."""

import json

from huggingface_hub import ModelCard, ModelCardData

from hope_hf import HopeConfig

from .check import Agreement
from .source import Source


def model_card(
    source: Source, name: str, config: HopeConfig, parameters: int, agreement: Agreement, license: str | None
) -> ModelCard:
    """The card of the folder `name`: a page for people, under metadata for the Hub."""
    metadata = ModelCardData(
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["hope", "nested-learning"],
        license=license,
        base_model=source.name if source.is_public else None,
    )
    whence = f"[{source.name}](https://huggingface.co/{source.name})" if source.is_public else f"`{source.name}`"
    of_file = f" (its file `{source.gguf.name}`)" if source.gguf else ""
    of_file += ", with an adapter merged into it" if source.merged is not None else ""
    memories = [layer for layer, kind in enumerate(config.layer_types) if kind == "hope_memory"]
    periods = ", ".join(f"{period:,}" for period in config.level_periods)
    rows = {
        "source": whence + of_file,
        "licence of the weights": license or "that of the source",
        "parameters": f"{parameters:,} ({str(config.dtype).removeprefix('torch.')})",
        "layers, width": f"{config.num_hidden_layers}, {config.hidden_size:,}",
        "attention sees": "all tokens"
        if config.sliding_window is None
        else f"the last {config.sliding_window:,} tokens and the first {config.attention_sinks} "
        f"(in {config.layer_types.count('window_attention')} layers)",
        "levels a block": f"{len(config.level_periods)}, with periods of {periods} tokens",
        "layers with new memories": ", ".join(map(str, memories)) or "none",
    }
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    but = (
        " without the attention of the layers with new memories, which add nothing until they are trained,"
        if memories
        else ""
    )
    example = json.dumps(name)
    page = f"""\
A conversion of {whence} into a HOPE language model (*Nested Learning*,
[arXiv 2512.24695](https://arxiv.org/abs/2512.24695)). The weights are those of the source, under its licence.

| | |
|---|---|
{table}

In float32, over {agreement.tokens} tokens of a text, the largest difference to a logit of the source{but} is
{agreement.difference:.1e} (at most {agreement.tolerance:.1e} is accepted). {agreement.new_tokens} greedy tokens after
them are equal. It was compared with {source.peer}.

## Use

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained({example}, trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained({example}, trust_remote_code=True)
```
"""
    return ModelCard(f"---\n{metadata.to_yaml()}\n---\n\n# {source.name.split('/')[-1]} as a HOPE\n\n{page}")
