"""The held-out text that an evaluation reads is what a run holds out."""

import pytest
import yaml
from four_corpora import prepare_words
from tokenizers.processors import TemplateProcessing

from hope_hf.data import DataConfig, build_data, load_tokenizer, validation_texts
from hope_hf.data.prepare import main


@pytest.fixture
def tokenizer_name(mixture) -> str:
    return str(mixture.parent / "tokenizer")


def held_out(**config) -> dict[str, list[str]]:
    return validation_texts(DataConfig(**config, validation_split_percentage=10))[0]


def test_of_a_mixture_and_of_its_shards(mixture, shards, tokenizer_name):
    """Corpus by corpus the same documents, and together the tokens that a run evaluates."""
    of_mixture, of_shards = held_out(dataset_mixture=str(mixture)), held_out(train_shards=str(shards))
    assert list(of_mixture) == list(of_shards) == ["notes", "rows", "pages", "book"]
    assert of_mixture == of_shards and all(of_mixture.values())
    data = build_data(DataConfig(train_shards=str(shards), block_size=16))
    ids = [data.tokenizer(text)["input_ids"] for texts in of_shards.values() for text in texts]
    # Every document begins with an EOS token.
    assert sum(len(row) + 1 for row in ids) == sum(len(block.tokens) for block in data.validation.blocks)


@pytest.mark.parametrize("count", [1, 3])
def test_the_first_documents_of_every_corpus(mixture, shards, count):
    whole, some = held_out(train_shards=str(shards)), held_out(train_shards=str(shards), max_eval_samples=count)
    assert some == {name: texts[:count] for name, texts in whole.items()}
    assert some == held_out(dataset_mixture=str(mixture), max_eval_samples=count)


def test_shards_inside_a_mixture_are_one_corpus(mixture, shards, tmp_path):
    corpora = {"old": {"shards": str(shards)}, "pages": yaml.safe_load(mixture.read_text())["corpora"]["pages"]}
    file = tmp_path / "mix.yaml"
    file.write_text(yaml.safe_dump({"corpora": {name: corpora[name] | {"weight": 1} for name in corpora}}))
    found, whole = held_out(dataset_mixture=str(file)), held_out(train_shards=str(shards))
    assert found == {"old": sum(whole.values(), []), "pages": whole["pages"]}


def test_of_shards_whose_documents_begin_as_prompts_do(mixture, tmp_path):
    tokenizer = load_tokenizer(str(mixture.parent / "tokenizer"))
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    template = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)])
    tokenizer.backend_tokenizer.post_processor = template
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    words = prepare_words(mixture, tmp_path / "shards")
    words[words.index("--tokenizer_name") + 1] = str(tmp_path / "tokenizer")
    assert main(words) == 0
    assert held_out(train_shards=str(tmp_path / "shards")) == held_out(dataset_mixture=str(mixture))
    block = build_data(DataConfig(train_shards=str(tmp_path / "shards"), block_size=500)).validation.blocks[0]
    assert (block.tokens[block.starts] == tokenizer.bos_token_id).all() and len(block.starts) > 1
    assert (block.tokens[block.starts[1:] - 1] == tokenizer.eos_token_id).all()


def test_other_text_is_one_corpus():
    texts, source = validation_texts(DataConfig(max_eval_samples=2))
    assert list(texts) == ["text"] and len(texts["text"]) == 2 and source == "built-in corpus"
