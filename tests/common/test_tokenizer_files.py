"""A tokenizer gives the ids of its tokenizer.json, whatever class transformers takes for it, and so does its copy."""

import json

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer

from hope_hf.common.tokenizer_files import read_tokenizer
from hope_hf.data.vocabulary import load_tokenizer, save_tokenizer, tokenizer_hash

TEXT = " leading\n\n1969  27 people went,\n    40 came back\n" * 20
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False)
DIGITS_FIRST = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), BYTES])
# As SentencePiece marks words: also where the text begins with a space.
MARKED = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
# By what people have: words, normalizer, `tokenizer_class` of tokenizer_config.json, `model_type` of config.json.
FOLDERS = {
    "SmolLM2": (DIGITS_FIRST, None, "GPT2Tokenizer", "llama"),
    "a tokenizer alone": (DIGITS_FIRST, None, "GPT2Tokenizer", None),
    "Llama 2": (None, MARKED, "LlamaTokenizerFast", "llama"),
    "a Qwen2 of one's own": (BYTES, None, "PreTrainedTokenizerFast", "qwen2"),
}


def folder_of(place, words, normalizer, tokenizer_class, model_type) -> Tokenizer:
    """Write a tokenizer that puts <s> before prompts; returns what its tokenizer.json holds."""
    written = Tokenizer(models.BPE(unk_token="<unk>"))
    if words is not None:
        written.pre_tokenizer = words
    if normalizer is not None:
        written.normalizer = normalizer
    trainer = trainers.BpeTrainer(
        vocab_size=360,
        special_tokens=["<unk>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    written.train_from_iterator([TEXT], trainer)
    written.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    written.save(str(place / "tokenizer.json"))
    fields = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "tokenizer_class": tokenizer_class}
    (place / "tokenizer_config.json").write_text(json.dumps(fields))
    if model_type is not None:
        (place / "config.json").write_text(json.dumps({"model_type": model_type}))
    return written


@pytest.mark.parametrize("name", FOLDERS)
def test_the_ids_are_those_of_the_file_also_after_a_copy(tmp_path, name):
    written = folder_of(tmp_path, *FOLDERS[name])
    with pytest.warns(UserWarning, match="tokenizer.json is followed, and transformers' .* gives other ids"):
        tokenizer = load_tokenizer(str(tmp_path))
    assert tokenizer(TEXT)["input_ids"] == written.encode(TEXT).ids
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.unk_token) == ("<s>", "</s>", "<unk>")
    save_tokenizer(tokenizer, tmp_path / "copy")
    copy = AutoTokenizer.from_pretrained(tmp_path / "copy")
    assert copy(TEXT)["input_ids"] == written.encode(TEXT).ids
    assert tokenizer_hash(copy) == tokenizer_hash(tokenizer)


def test_an_added_token_behind_a_gap_is_refused(tmp_path):
    """The library gives it the next id, and a model reads another embedding."""
    written = folder_of(tmp_path, BYTES, None, "PreTrainedTokenizerFast", None)
    written.add_tokens(["<|im_end|>"])
    file = json.loads(written.to_str())
    last = file["added_tokens"][-1]
    assert load_tokenizer(str(tmp_path))
    for index in (last["id"], last["id"] + 64):
        (tmp_path / "tokenizer.json").write_text(json.dumps(file | {"added_tokens": [last | {"id": index}]}))
        if index == last["id"]:
            assert load_tokenizer(str(tmp_path)).convert_tokens_to_ids("<|im_end|>") == index
        else:
            with pytest.raises(ValueError, match=f"'<.im_end.>' the id {index}, and the library .* {last['id']}: add"):
                load_tokenizer(str(tmp_path))


@pytest.mark.parametrize("tokenizer_class, model_type", [("GPT2Tokenizer", None), ("Qwen2Tokenizer", "qwen2")])
def test_a_space_before_a_text_is_as_the_config_says(tmp_path, tokenizer_class, model_type):
    written = folder_of(tmp_path, pre_tokenizers.ByteLevel(add_prefix_space=False), None, tokenizer_class, model_type)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"add_prefix_space": True}))
    expected = written.encode(f" people {TEXT}").ids
    tokenizer = load_tokenizer(str(tmp_path))
    assert tokenizer(f"people {TEXT}")["input_ids"] == expected
    save_tokenizer(tokenizer, tmp_path / "copy")
    assert load_tokenizer(str(tmp_path / "copy"))(f"people {TEXT}")["input_ids"] == expected


def test_a_class_that_agrees_with_the_file_is_left_alone(tmp_path, recwarn):
    folder_of(tmp_path, BYTES, None, "GPT2Tokenizer", None)
    assert type(read_tokenizer(str(tmp_path))).__name__ == "GPT2Tokenizer"
    assert not recwarn
