"""The tokenizer: exact, deterministic, loadable, and never written over another one."""

import inspect
import json
import random
import time

import pytest
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from hope_hf.data.tokenizer import main
from hope_hf.data.tokenizer_text import Text, sample
from hope_hf.data.vocabulary import (
    bytes_per_id,
    load_tokenizer,
    save_tokenizer,
    train_tokenizer,
    warn_of_other_tokenizer,
)

TEXT = inspect.getsource(json.decoder) + "  # naïve, 3 × 7, ½, 🐍\r\n\tπ = 3.14159\n"
ODD = "\x00\x07 \u200b\u202e tabs\t\tand  spaces \n\n\r\n 🏴󠁧󠁢󠁳󠁣󠁴󠁿 e\u0301 é <|endoftext|> <|pad|> ﷽ "


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([TEXT], 400)


@pytest.fixture
def text_file(tmp_path):
    file = tmp_path / "book.txt"
    file.write_text(TEXT, encoding="utf-8")
    return file


def test_a_tokenizer_that_is_not_the_model_s_is_named(tmp_path, recwarn):
    made = {}
    for name, text in (("model", "some words of a book"), ("other", "quite different letters")):
        save_tokenizer(train_tokenizer([text] * 9, 270), tmp_path / name)
        made[name] = load_tokenizer(str(tmp_path / name))
    warn_of_other_tokenizer(made["model"], str(tmp_path / "model"))
    warn_of_other_tokenizer(made["other"], "owner/name")
    assert not recwarn
    with pytest.warns(UserWarning, match="other is another tokenizer than that in .*model"):
        warn_of_other_tokenizer(made["other"], str(tmp_path / "model"))


@pytest.mark.parametrize("text", [TEXT, ODD, " leading", "trailing ", "\n"])
def test_round_trip_is_exact_and_bytes_are_counted(tokenizer, text):
    ids = tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    assert tokenizer.decode(ids) == text
    table = bytes_per_id(tokenizer)
    assert sum(table[index] for index in ids) == len(text.encode())
    assert table[tokenizer.eos_token_id] == table[tokenizer.pad_token_id] == 0


def test_saved_tokenizer_loads_through_the_auto_class(tokenizer, tmp_path):
    save_tokenizer(tokenizer, tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded(ODD)["input_ids"] == tokenizer(ODD)["input_ids"]
    for name in ("eos_token_id", "bos_token_id", "pad_token_id"):
        assert getattr(loaded, name) == getattr(tokenizer, name)
    assert loaded.eos_token_id != loaded.pad_token_id


def test_bytes_of_a_tokenizer_with_word_marks():
    entries = ["<unk>", "▁the", "▁", "é", "<0x0A>", "</s>"]
    backend = Tokenizer(models.BPE(vocab={entry: index for index, entry in enumerate(entries)}, merges=[]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>")
    assert bytes_per_id(tokenizer) == [0, 4, 1, 2, 1, 0]


def test_bytes_of_added_tokens_and_behind_gaps_of_a_vocabulary(tokenizer, tmp_path):
    more = train_tokenizer([TEXT], 400)
    more.add_tokens(["naïve", "é"])
    file = json.loads(tokenizer.backend_tokenizer.to_str())
    entries = file["model"]["vocab"]
    for entry, index in entries.items():
        # Two special tokens and 256 bytes come before what was merged.
        entries[entry] = index if index < 258 else index + 50
    (tmp_path / "tokenizer.json").write_text(json.dumps(file))
    loaded = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"), eos_token="<|endoftext|>")
    for kind in (more, loaded):
        table = bytes_per_id(kind)
        ids = kind(TEXT, add_special_tokens=False)["input_ids"]
        assert sum(table[index] for index in ids) == len(TEXT.encode())


def test_the_command_writes_the_same_tokenizer_as_the_function_and_over_no_other(text_file, tmp_path, capsys):
    target = tmp_path / "out"
    words = ["--files", str(text_file), "--output_dir", str(target), "--vocab_size"]
    # The same command again finds its own result and keeps it.
    assert main([*words, "400"]) == main([*words, "400"]) == 0
    assert AutoTokenizer.from_pretrained(target).get_vocab() == train_tokenizer([TEXT], 400).get_vocab()
    before = {file.name: file.read_bytes() for file in target.iterdir()}
    assert main([*words, "300"]) == 2
    assert f"--output_dir {target}" in capsys.readouterr().err
    assert {file.name: file.read_bytes() for file in target.iterdir()} == before


def test_a_file_of_several_names_counts_once(text_file, tmp_path, capsys):
    names = ["--files", str(text_file), str(tmp_path / "*.txt"), f"{tmp_path}/./book.txt"]
    assert main([*names, "--vocab_size", "400", "--output_dir", str(tmp_path / "made")]) == 0
    assert list(json.loads((tmp_path / "made" / "tokenizer_report.json").read_text())["corpora"]) == [str(text_file)]


def test_a_mixture_is_sampled_by_weight_and_reported_on(mixture, tmp_path, capsys):
    target = tmp_path / "out"
    words = ["--dataset_mixture", str(mixture), "--vocab_size", "300", "--output_dir", str(target)]
    assert main([*words, "--max_bytes", "6000"]) == 0
    report = json.loads((target / "tokenizer_report.json").read_text())
    assert report["vocab_size"] == 300 and report["special_tokens"]["eos_token"] == "<|endoftext|>"
    assert list(report["corpora"]) == ["notes", "rows", "pages", "book"]
    for corpus in report["corpora"].values():
        assert corpus["bytes_per_token"] == corpus["bytes"] / corpus["tokens"] > 1
        assert corpus["exact_round_trips"] == corpus["documents"] and corpus["unknown_tokens"] == 0


def test_a_sample_has_the_shares_of_the_weights_and_no_more_than_its_bytes():
    documents = Dataset.from_dict({"text": ["é" * 50] * 100})
    texts = [Text("a", documents, 3), Text("b", Dataset.from_dict({"text": ["b" * 50] * 100}), 1)]
    drawn = "".join(sample(texts, 4_000))
    assert (drawn.count("é"), drawn.count("b")) == (1_500, 1_000)
    assert "".join(sample([Text("a", documents)], 1_000_000)) == "é" * 5_000


@pytest.mark.parametrize("letters", ["ACGT", " \n"])
def test_a_text_without_spaces_is_learned_from_in_pieces(letters):
    text = "".join(random.Random(0).choices(letters, k=200_000))
    begin = time.process_time()
    with pytest.warns(UserWarning, match="words of more than 1,024 characters without a space"):
        assert len(train_tokenizer([text], 600)) == 600
    # As one word it takes a hundred times as long.
    assert time.process_time() - begin < 10


def test_a_tokenizer_without_eos_is_refused(tmp_path):
    backend = train_tokenizer([TEXT], 300).backend_tokenizer
    PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="no EOS token"):
        load_tokenizer(str(tmp_path))
