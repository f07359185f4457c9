"""The model card: metadata that the Hub reads, and a page that people read."""

import json
import re

from huggingface_hub import ModelCard, ModelCardData
from transformers import PreTrainedConfig, PreTrainedModel

from .facts import EvaluationFacts, TrainingFacts, language_modeling_result
from .public import as_code_block, as_text, printable

PROMPT = "Once upon a time"

LIMITS = """\
- Needs `trust_remote_code=True`, or the package `hope_hf`.
- No assisted (speculative) decoding, no continuous batching, no vLLM backend and no GGUF: these expect caches of keys
  and values, but this model's state is a memory that every token may change.
- The training text decides what the model can do. Nothing was done to make its output true, safe or polite."""

CITATION = """\
```bibtex
@article{behrouz2025nested,
  title={Nested Learning: The Illusion of Deep Learning Architectures},
  author={Behrouz, Ali and Razaviyayn, Meisam and Zhong, Peilin and Mirrokni, Vahab},
  journal={arXiv preprint arXiv:2512.24695},
  year={2025}
}
```"""


def model_card(
    model: PreTrainedModel,
    repo_id: str,
    license: str,
    training: TrainingFacts | None,
    evaluation: EvaluationFacts | None,
    base_model: str | None = None,
) -> ModelCard:
    """The card of `model` in the repository `repo_id`; what is not known is left out.

    `base_model`: name on the Hub of the model that it comes from, if it has no training of its own.
    """
    sections = {
        "": _introduction(model),
        "Use": usage(repo_id),
        "Training": _training(training) if training else "",
        "Evaluation": _evaluation(training, evaluation),
        "Limits": LIMITS,
        "Citation": CITATION,
    }
    parts = []
    for title, text in sections.items():
        if text:
            parts.append(f"## {title}\n\n{text}" if title else text)
    page = "\n\n".join(parts)
    name = printable(repo_id.split("/")[-1])
    metadata = _metadata(model, name, license, training, evaluation, base_model)
    return ModelCard(f"---\n{metadata.to_yaml()}\n---\n\n# {as_text(name)}\n\n{page}\n")


def usage(repo_id: str) -> str:
    """The usage example of the card, fenced."""
    name = json.dumps(repo_id)
    return f"""\
```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained({name}, trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained({name}, trust_remote_code=True)
inputs = tokenizer({json.dumps(PROMPT)}, return_tensors="pt", return_token_type_ids=False)
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=40)[0]))
```"""


def usage_code(card: str) -> str:
    """The Python of the card's usage example."""
    return re.search(r"^## Use\n\n```python\n(.*?)^```", card, flags=re.DOTALL | re.MULTILINE)[1]


def _metadata(
    model: PreTrainedModel,
    name: str,
    license: str,
    training: TrainingFacts | None,
    evaluation: EvaluationFacts | None,
    base_model: str | None,
) -> ModelCardData:
    metrics = list(evaluation.metrics) if evaluation else []
    datasets = None
    if training:
        base_model = training.base_model
        datasets = [training.dataset] if training.dataset else None
        for metric, value in training.losses.items():
            text = f"held out of {training.text}"
            metrics.append(language_modeling_result(text, metric.removeprefix("eval_"), value))
    return ModelCardData(
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=list(model.model_tags),
        license=printable(license),
        datasets=datasets,
        base_model=base_model,
        # The Hub refuses a model-index with a name and no results, or with results and no name.
        model_name=name if metrics else None,
        eval_results=metrics or None,
    )


def _introduction(model: PreTrainedModel) -> str:
    config = model.config
    if len(config.level_periods) == 1:
        levels = "an MLP"
    else:
        levels = f"{'a chain' if config.level_variant == 'sequential' else 'a sum'} of MLPs"
    periods = ", ".join("step" if period == 1 else f"{period:,} tokens" for period in config.level_periods)
    dtype = str(model.dtype).removeprefix("torch.")
    return f"""\
A HOPE language model (*Nested Learning*, [arXiv 2512.24695](https://arxiv.org/abs/2512.24695)). Its sequence mixer is
{_mixers(config)}. Behind it is {levels} (the levels of the continuum memory system).

| | |
|---|---|
| parameters | {model.num_parameters():,} ({dtype}) |
| layers, width | {config.num_hidden_layers}, {config.hidden_size:,} |
| vocabulary | {config.vocab_size:,} |
| levels | {len(config.level_periods)}, updated every {periods} of training |"""


def _mixers(config: PreTrainedConfig) -> str:
    """What mixes tokens, in words."""
    kinds = list(dict.fromkeys(config.mixers))
    recurrent = [kind.describe(config) for kind in kinds if kind.is_recurrent]
    others = [kind for kind in kinds if not kind.is_recurrent]
    if not recurrent:
        return " and ".join(kind.name for kind in others) + " (Hope-Attention)"
    text = " and ".join(recurrent)
    for kind in others:
        number = config.mixers.count(kind)
        text += f" (and {kind.name} in {number} of the {config.num_hidden_layers} layers)"
    return text


def _training(training: TrainingFacts) -> str:
    length = f", {training.tokens:,} tokens in {training.steps:,} steps" if training.tokens else ""
    packages = [f"{name} {version}" for name, version in training.versions.items()]
    versions = as_text(", ".join(packages))
    return f"""\
Text: {as_text(training.text)}{length}, on {training.num_processes} process(es) with {versions}.

{as_code_block(*training.commands)}"""


def _evaluation(training: TrainingFacts | None, evaluation: EvaluationFacts | None) -> str:
    parts = []
    if training and training.losses:
        figures = []
        for name, value in training.losses.items():
            figures.append(f"{name.removeprefix('eval_').replace('_', ' ')} {value:.4f}")
        parts.append(
            f"At the end of training, on text held out of it: {', '.join(figures)} (the loss in nats per token)."
        )
    if evaluation:
        limited = f", **limited to {as_text(evaluation.limit)} samples**" if evaluation.limit else ""
        parts.append(f"Measured on {as_text(evaluation.date)}{limited} with:\n\n{as_code_block(evaluation.command)}")
        for suite, tables in evaluation.tables.items():
            parts.append(f"### {as_text(suite)}\n\n{tables}")
    return "\n\n".join(parts)
