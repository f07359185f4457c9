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
    link = f"[{source.name}](https://huggingface.co/{source.name})" if source.is_public else f"`{source.name}`"
    of = link
    if source.gguf is not None:
        of += f" (its file `{source.gguf.name}`)"
    if source.merged is not None:
        of += ", with an adapter merged into it"
    attention = "all tokens"
    if config.sliding_window is not None:
        attention = (
            f"the last {config.sliding_window:,} tokens and the first {config.attention_sinks} "
            f"(in {config.layer_types.count('window_attention')} layers)"
        )
    periods = ", ".join(f"{period:,}" for period in config.level_periods)
    memories = [str(layer) for layer, kind in enumerate(config.layer_types) if kind == "hope_memory"]
    without = ""
    if memories:
        without = " without the attention of the layers with new memories, which add nothing until they are trained,"
    example = json.dumps(name)
    page = f"""\
A conversion of {link} into a HOPE language model (*Nested Learning*,
[arXiv 2512.24695](https://arxiv.org/abs/2512.24695)). The weights are those of the source, under its licence.

| | |
|---|---|
| source | {of} |
| licence of the weights | {license or "that of the source"} |
| parameters | {parameters:,} ({str(config.dtype).removeprefix("torch.")}) |
| layers, width | {config.num_hidden_layers}, {config.hidden_size:,} |
| attention sees | {attention} |
| levels a block | {len(config.level_periods)}, with periods of {periods} tokens |
| layers with new memories | {", ".join(memories) or "none"} |

In float32, over {agreement.tokens} tokens of a text, the largest difference to a logit of the source{without} is
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
