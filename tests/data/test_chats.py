"""Chats: their files, the two ways to find the assistant's tokens, and the batches made of them."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest
from datasets import Dataset, DatasetDict
from datasets.fingerprint import Hasher

from hope_hf.data import DataConfig, build_data, load_tokenizer, save_tokenizer, train_tokenizer
from hope_hf.data.chats import PLAIN_TEMPLATE, chat_text, make_chat_encoder
from hope_hf.data.documents import open_sources
from hope_hf.data.files import load_files

MARKED = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|end|>"
    "{% endgeneration %}{% else %}{{ m.content }}<|end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
PLAIN = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")
CHATS = [
    [
        {"role": "system", "content": f"Count from {number}."},
        {"role": "user", "content": "Next?"},
        {"role": "assistant", "content": f"It is {number + 1}."},
        {"role": "user", "content": "And next?"},
        {"role": "assistant", "content": f"It is {number + 2}, as you know."},
    ]
    for number in range(60)
]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture
def tokenizer():
    found = train_tokenizer([json.dumps(chat) for chat in CHATS], 400)
    found.add_tokens(["<|user|>", "<|assistant|>", "<|system|>", "<|end|>"], special_tokens=True)
    return found


def learned(tokenizer, tokens: list[int]) -> list[str]:
    """The texts of the runs of learned tokens."""
    runs, before = [], False
    for token in tokens:
        if token >= 0:
            runs = [*(runs if before else [*runs, []])]
            runs[-1].append(token)
        before = token >= 0
    return [tokenizer.decode(run) for run in runs]


def test_the_turns_of_the_assistant_are_learned_with_their_end(tokenizer):
    found = {}
    for template in (MARKED, PLAIN, PLAIN_TEMPLATE):
        tokenizer.chat_template = template
        (found[template],) = make_chat_encoder(tokenizer)([json.dumps(CHATS[0])])
        end = tokenizer.eos_token if template == PLAIN_TEMPLATE else "<|end|>"
        first, second = learned(tokenizer, found[template])
        assert (first.strip(), second.strip()) == (f"It is 1.{end}", f"It is 2, as you know.{end}")
        whole = [token if token >= 0 else ~token for token in found[template]]
        assert tokenizer.decode(whole) == tokenizer.apply_chat_template(CHATS[0], tokenize=False)
    assert found[MARKED] == found[PLAIN]


def test_a_template_that_shows_no_turns_or_fails_is_refused(tokenizer):
    # As templates that leave out what the assistant thought before the last turn.
    plain, marked = (
        t.replace("{{ m.content }}", "{{ m.content if loop.last else 'short' }}") for t in (PLAIN, MARKED)
    )
    tokenizer.chat_template = marked
    assert "short<|end|>" in learned(tokenizer, make_chat_encoder(tokenizer)([json.dumps(CHATS[0])])[0])[0]
    tokenizer.chat_template = plain
    with pytest.raises(ValueError, match="--assistant_only_loss: .* writes a turn anew when others follow"):
        make_chat_encoder(tokenizer)([json.dumps(CHATS[0])])
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(ValueError, match=r"fails on the chat \[.*: roles must alternate"):
        make_chat_encoder(tokenizer)([json.dumps(CHATS[0])])


def write(folder: Path, kind: str) -> dict:
    if kind == "folder":
        Dataset.from_dict({"messages": CHATS}).save_to_disk(folder / "set")
        return {"dataset_name": str(folder / "set")}
    path = folder / f"chats.{kind}"
    if kind == "parquet":
        pyarrow.parquet.write_table(pa.table({"messages": CHATS, "id": range(len(CHATS))}), path)
    elif kind == "json":
        path.write_text(json.dumps([{"messages": chat} for chat in CHATS]))
    else:
        path.write_text("".join(json.dumps({"messages": chat, "source": "x"}) + "\n" for chat in CHATS))
    return {"train_file": str(path)}


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet", "folder"])
def test_chats_of_files_and_data_sets_become_batches_that_resume(tmp_path, tokenizer, kind, streaming):
    tokenizer.chat_template = MARKED
    save_tokenizer(tokenizer, tmp_path / "tokenizer")
    config = DataConfig(
        **write(tmp_path, kind), assistant_only_loss=True, tokenizer_name=str(tmp_path / "tokenizer"), block_size=64,
        per_device_train_batch_size=2, streaming=streaming,
    )  # fmt: skip
    data = build_data(config)
    batches = [batch for batch, _ in zip(data.train, range(4), strict=False)]
    for batch, _ in batches:
        ids, labels = batch["input_ids"], batch["labels"]
        predicted = labels >= 0
        assert (ids >= 0).all() and (labels[predicted] == ids[predicted]).all() and (labels[~predicted] == -100).all()
        assert 0.1 < predicted.float().mean() < 0.7
        # Positions begin anew with every chat.
        assert (batch["position_ids"][:, 1:] == 0).any()
    shown = tokenizer.decode(batches[0][0]["labels"][batches[0][0]["labels"] >= 0])
    assert "It is" in shown and "Count" not in shown and "Next?" not in shown
    resumed = build_data(config, state=batches[1][1])
    for (batch, _), (again, _) in zip(batches[2:], resumed.train, strict=False):
        assert all(batch[name].equal(again[name]) for name in batch)
    assert build_data(config).fingerprint == data.fingerprint and len(data.validation)
    # A second process finds the tokens in the cache.
    encoders = [make_chat_encoder(load_tokenizer(config.tokenizer_name)) for _ in range(2)]
    assert Hasher.hash(encoders[0]) == Hasher.hash(encoders[1])


def test_a_file_of_one_chat_is_no_table_of_columns(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": CHATS[0]}) + "\n")
    (text,) = load_files([str(tmp_path / "a.jsonl")], "--train_file", chats=True)["text"]
    assert text == chat_text(CHATS[0])


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "folder"])
def test_the_chats_of_sharegpt_are_read_from_their_column(tmp_path, kind):
    names = {"user": "human", "assistant": "gpt", "system": "system"}
    chats = [[{"from": names[m["role"]], "value": m["content"]} for m in chat] for chat in CHATS]
    config = {"assistant_only_loss": True, "tokenizer_name": "any"}
    if kind == "folder":
        DatasetDict(train=Dataset.from_dict({"conversations": chats})).save_to_disk(tmp_path / "set")
        config["dataset_name"] = str(tmp_path / "set")
    else:
        config["train_file"] = str(tmp_path / f"a.{kind}")
        if kind == "parquet":
            pyarrow.parquet.write_table(pa.table({"conversations": chats}), tmp_path / "a.parquet")
        else:
            rows = [json.dumps({"id": index, "conversations": chat}) for index, chat in enumerate(chats)]
            (tmp_path / "a.jsonl").write_text("\n".join(rows))
    found = open_sources(DataConfig(**config, on_bad_rows="skip"))
    texts = [*found.train["text"], *found.validation["text"]]
    assert sorted(texts) == sorted(map(json.dumps, CHATS))


def test_chats_that_are_none_are_bad_rows(tmp_path):
    rows = [{"messages": CHATS[0]}, {"messages": []}, {"messages": CHATS[0][:2]}, {"text": "a"}, {"messages": "a"}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows, {"messages": CHATS[1]}]))
    config = {"train_file": str(tmp_path / "a.jsonl"), "assistant_only_loss": True, "tokenizer_name": "any"}
    with pytest.raises(ValueError, match="a.jsonl, row 2, has no chat with a turn of the assistant in the col"):
        open_sources(DataConfig(**config))
    with pytest.warns(UserWarning, match="4 of 6 rows"):
        sources = open_sources(DataConfig(**config, on_bad_rows="skip"))
    assert len(sources.train) + len(sources.validation) == 2
    (tmp_path / "b.csv").write_text("messages\na\n")
    with pytest.raises(ValueError, match="b.csv has no lists of messages: give chats as .jsonl"):
        open_sources(DataConfig(**config | {"train_file": str(tmp_path / "b.csv")}))
    DatasetDict(train=Dataset.from_dict({"text": ["a"]})).save_to_disk(tmp_path / "set")
    with pytest.raises(ValueError, match="set has no column 'messages' of chats among text: name one with"):
        open_sources(DataConfig(dataset_name=str(tmp_path / "set"), assistant_only_loss=True, tokenizer_name="any"))


def test_chats_need_a_file_and_a_tokenizer():
    for options in ({"tokenizer_name": "a"}, {"tokenizer_name": "a", "dataset_name": "synthetic"}):
        with pytest.raises(ValueError, match="--assistant_only_loss reads chats: name them with --train_file"):
            DataConfig(assistant_only_loss=True, **options)
    with pytest.raises(ValueError, match="--assistant_only_loss teaches a model that knows the language"):
        DataConfig(assistant_only_loss=True, train_file="a.jsonl")
