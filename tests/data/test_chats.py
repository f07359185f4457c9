"""Chats: their files, the two ways to find the assistant's tokens, and the batches made of them."""

import datetime
import json
import warnings
from pathlib import Path

import dill
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from datasets import Dataset, DatasetDict
from datasets.fingerprint import Hasher
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from hope_hf.data import DataConfig, build_data, load_tokenizer, plain_ids, save_tokenizer, train_tokenizer
from hope_hf.data.chat_template import PLAIN_TEMPLATE, ChatTemplate
from hope_hf.data.chats import BadChat, chat_text, filled_chats, make_chat_encoder
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


@pytest.mark.parametrize("on_bad_rows", ["error", "skip"])
@pytest.mark.parametrize("count", [1, 2])
def test_chats_that_take_several_lines_are_read(tmp_path, count, on_bad_rows):
    written = [json.dumps({"id": "x", "messages": chat}, indent=2) for chat in CHATS[:count]]
    (tmp_path / "a.json").write_text("\n".join(written) + "\n")
    found = load_files([str(tmp_path / "a.json")], "--train_file", chats=True, on_bad_rows=on_bad_rows)
    assert found["text"][:] == list(map(chat_text, CHATS[:count]))


def test_half_of_a_surrogate_pair_in_a_chat_is_no_character(tokenizer):
    tokenizer.chat_template = PLAIN_TEMPLATE
    chat = [{"role": "user", "content": "a\ud800"}, {"role": "assistant", "content": "b\udc00c"}]
    (tokens,) = make_chat_encoder(tokenizer)([chat_text(chat)])
    assert learned(tokenizer, tokens) == ["b?c<|endoftext|>"]


def test_dates_beside_what_is_said_are_no_mistake():
    chat = [{"role": "assistant", "content": "b", "at": datetime.date(2026, 1, 2)}]
    assert json.loads(chat_text(chat))[0]["at"] == "2026-01-02"


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


def rows_of(folder: Path, rows: list[dict], kind: str = "jsonl") -> list[str]:
    """The names of a new file with the rows."""
    path = folder / f"rows.{kind}"
    if kind == "parquet":
        pyarrow.parquet.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [str(path)]


def test_the_usual_names_of_roles_are_mapped_and_others_are_named_with_their_row(tmp_path):
    names = {"chatgpt": "assistant", "bing": "assistant", "bard": "assistant", "model": "assistant", "human": "user"}
    for name, role in names.items():
        chat = [{"from": name, "value": "a"}, {"role": name, "content": "b"}, {"from": "gpt", "value": "c"}]
        assert [message["role"] for message in json.loads(chat_text(chat))] == [role, role, "assistant"]
    rows = [{"conversations": CHATS[0]}, {"conversations": [{"from": "narrator", "value": "a"}, *CHATS[1]]}]
    files = rows_of(tmp_path, rows)
    with pytest.raises(ValueError, match="rows.jsonl, row 2, has a turn of the role 'narrator'"):
        load_files(files, "--train_file", chats=True)
    with pytest.warns(UserWarning, match="1 of 2 rows"):
        found = load_files(files, "--train_file", chats=True, on_bad_rows="skip")
    assert [text for text in found["text"] if text] == [json.dumps(CHATS[0])]


def test_a_role_that_the_template_names_is_known(tokenizer):
    chat = [{"role": "ipython", "content": "a"}, *CHATS[0]]
    tokenizer.chat_template = MARKED
    with pytest.raises(BadChat, match="ipython"):
        chat_text(chat, template=ChatTemplate(tokenizer))
    tokenizer.chat_template = MARKED + "{% if 'ipython' == 1 %}{% endif %}"
    assert json.loads(chat_text(chat, template=ChatTemplate(tokenizer))) == chat


@pytest.mark.parametrize("template", [MARKED, PLAIN, PLAIN_TEMPLATE])
def test_turns_of_weight_0_are_read_and_not_learned(tokenizer, template):
    tokenizer.chat_template = template
    chat = [dict(message) for message in CHATS[0]]
    encode = make_chat_encoder(tokenizer)
    (whole,) = encode([json.dumps(chat)])
    chat[2]["weight"], chat[4]["weight"] = 0, 1
    (found,) = encode([chat_text(chat)])
    assert [max(token, ~token) for token in found] == [max(token, ~token) for token in whole]
    (second,) = learned(tokenizer, found)
    assert second == learned(tokenizer, whole)[1]
    for weights in ((0, 0), (0.5, 1)):
        chat[2]["weight"], chat[4]["weight"] = weights
        with pytest.raises(BadChat, match="no chat with a turn of the assistant|weight 0.5"):
            chat_text(chat)


@pytest.mark.parametrize("template", [MARKED, PLAIN, PLAIN_TEMPLATE])
def test_content_is_text_whatever_it_spells(tokenizer, template):
    """The tokens of each content are those of plain text, and the marks are as many as without such words."""
    tokenizer.chat_template = template
    spelled = "It ends<|end|>\n<|user|> here <|endoftext|>"
    plain = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    chat = [{"role": "user", "content": f"x{spelled}"}, {"role": "assistant", "content": f"y{spelled}"}]
    encode = make_chat_encoder(tokenizer)
    (expected,), (found,) = encode([json.dumps(plain)]), encode([json.dumps(chat)])
    text = plain_ids(tokenizer, spelled)
    marks = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    assert not marks & set(text) and tokenizer.decode(text) == spelled
    of_template, of_chat = ([one for one in ids if max(one, ~one) in marks] for ids in (expected, found))
    assert of_template == of_chat and of_chat
    assert len(found) == len(expected) + 2 * len(text)
    assert learned(tokenizer, found)[0].strip() == learned(tokenizer, expected)[0].strip().replace("y", f"y{spelled}")
    copied = dill.loads(dill.dumps(encode))
    assert copied([json.dumps(chat)]) == [found]
    ((shown, ids),) = filled_chats(ChatTemplate(tokenizer), [json.dumps(chat)])
    assert spelled in shown and len(ids) == len(found)


@pytest.mark.parametrize("scheme", ["first", "always", "bytes"])
def test_an_ordinary_chat_has_the_tokens_that_transformers_gives_it(scheme):
    backend = Tokenizer(models.BPE(unk_token="<unk>"))
    if scheme == "bytes":
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    marks = [
        AddedToken("<unk>"),
        AddedToken("<|end|>", lstrip=True),
        AddedToken("<|user|>", rstrip=True),
        "<|assistant|>",
    ]
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=marks, show_progress=False)
    backend.train_from_iterator([json.dumps(chat, ensure_ascii=False) for chat in CHATS] + ["größer 😀"], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="<|end|>")
    tokenizer.chat_template = MARKED
    chat = [{"role": "user", "content": " Next größer? "}, {"role": "assistant", "content": "It 😀 is "}] * 2
    options = {"return_dict": True, "return_assistant_tokens_mask": True}
    expected = tokenizer.apply_chat_template(chat, **options)
    (found,) = make_chat_encoder(tokenizer)([json.dumps(chat)])
    assert [max(token, ~token) for token in found] == expected["input_ids"]
    assert [int(token >= 0) for token in found] == expected["assistant_masks"]


CALL = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": '{"zone": null}'}}
WITH_TOOLS = [
    {"role": "user", "content": "time?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "12"},
    {"role": "assistant", "content": [{"type": "text", "text": "no"}, {"type": "text", "text": "on"}]},
]
TOOL_TEMPLATE = (
    "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}{% for m in messages %}{{ m.role }}: "
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
    "{{ c.function.name }} {{ c.function.arguments | tojson }}{% endfor %}|{% endgeneration %}"
    "{% else %}{{ m.content }}|{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_calls_of_tools_parts_of_content_and_the_column_of_tools_are_read(tmp_path, tokenizer, kind):
    tokenizer.chat_template = TOOL_TEMPLATE
    tools = [{"type": "function", "function": {"name": name}} for name in ("now", "then")]
    rows = [{"messages": WITH_TOOLS[:3] + [WITH_TOOLS[3] | {"content": "noon"}], "tools": json.dumps(tools)}]
    if kind == "jsonl":
        rows = [{"messages": WITH_TOOLS, "tools": tools}]
    template = ChatTemplate(tokenizer)
    (text,) = load_files(rows_of(tmp_path, rows, kind), "--train_file", chats=True, template=template)["text"]
    (found,) = make_chat_encoder(tokenizer)([text])
    whole = tokenizer.decode([max(token, ~token) for token in found])
    # The arguments are an object, which the template writes as JSON.
    called = 'now {"zone": null}|'
    assert whole == f"[now][then]user: time?|assistant: {called}tool: 12|assistant: noon|"
    assert [run.strip() for run in learned(tokenizer, found)] == [called, "noon|"]


def test_a_chat_without_tools_is_the_text_that_it_was():
    assert chat_text(CHATS[0], tools=[]) == chat_text(CHATS[0], tools="[]") == json.dumps(CHATS[0])


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({"role": "user", "content": None}, "without content"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": "a"}]}, "no text .image_url"),
        ({"role": "user", "content": 5}, "no text .5"),
        ({"content": "a"}, "without a role"),
        ({"role": "user", "content": "refuse"}, "template fails .not this"),
    ],
)
@pytest.mark.parametrize("streaming", [False, True])
def test_one_bad_chat_is_named_or_left_out(tmp_path, tokenizer, message, reason, streaming):
    tokenizer.chat_template = MARKED + "{{ raise_exception('not this') if messages[0].content == 'refuse' }}"
    rows = [{"messages": CHATS[0]}, {"messages": [message, *CHATS[1]]}, {"messages": CHATS[2]}]
    files = rows_of(tmp_path, rows)
    options = {"chats": True, "template": ChatTemplate(tokenizer), "streaming": streaming}
    with pytest.raises(ValueError, match=f"rows.jsonl, row 2, .*{reason}.*on_bad_rows skip"):
        list(load_files(files, "--train_file", **options))
    with pytest.warns(UserWarning, match="1 of 3 rows"):
        found = list(load_files(files, "--train_file", on_bad_rows="skip", **options))
    assert [row["text"] for row in found if row["text"]] == [json.dumps(CHATS[0]), json.dumps(CHATS[2])]


def test_a_bad_chat_of_a_data_set_is_named_or_left_out(tmp_path):
    rows = [{"messages": CHATS[index]} for index in range(4)] + [{"messages": CHATS[5][:2]}]
    DatasetDict(train=Dataset.from_list(rows)).save_to_disk(tmp_path / "set")
    config = {"dataset_name": str(tmp_path / "set"), "assistant_only_loss": True, "tokenizer_name": "any"}
    with pytest.raises(ValueError, match="--dataset_name .*set, row 5, has no chat"):
        open_sources(DataConfig(**config))
    with pytest.warns(UserWarning, match="1 of 5 rows"):
        sources = open_sources(DataConfig(**config, on_bad_rows="skip"))
    assert len(sources.train) + len(sources.validation) == 4


@pytest.mark.parametrize("count", [1, 30])
def test_one_chat_cannot_be_split_and_the_message_says_so(tmp_path, count):
    files = rows_of(tmp_path, [{"messages": CHATS[0]}] * count)
    config = {"train_file": files, "assistant_only_loss": True, "tokenizer_name": "any"}
    with pytest.raises(ValueError, match="rows.jsonl holds one chat.*--validation_file"):
        open_sources(DataConfig(**config))
    sources = open_sources(DataConfig(**config, validation_file=files))
    assert sources.train["text"][0] == sources.validation["text"][0] == json.dumps(CHATS[0])


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(("how", "count"), [("keep", 12), ("cut", 12), ("drop", 11)])
def test_chats_longer_than_a_block_are_kept_cut_or_left_out_and_counted(tmp_path, tokenizer, how, count, streaming):
    tokenizer.chat_template = MARKED
    save_tokenizer(tokenizer, tmp_path / "tokenizer")
    encode = make_chat_encoder(tokenizer)
    long = [CHATS[0][1], CHATS[0][2] | {"content": "It is 1. " * 40}]
    chats = [*(chat[1:3] for chat in CHATS[1:12]), long]
    rows = [encode([json.dumps(chat)])[0] for chat in chats]
    block = 64
    assert len(rows[11]) > 2 * block > 2 * max(map(len, rows[:11]))
    (tmp_path / "held").mkdir()
    held = rows_of(tmp_path / "held", [{"messages": chat} for chat in chats[:11]])
    config = DataConfig(
        train_file=rows_of(tmp_path, [{"messages": chat} for chat in chats]), validation_file=held,
        assistant_only_loss=True, tokenizer_name=str(tmp_path / "tokenizer"), block_size=block,
        per_device_train_batch_size=1, streaming=streaming, shuffle_buffer_size=1, long_chats=how,
    )  # fmt: skip
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        data = build_data(config)
    assert any("1 of 12 chats are longer than --block_size 64" in str(one.message) for one in told) is not streaming
    expected = {"keep": rows, "cut": [row[:block] for row in rows], "drop": rows[:11]}[how]
    assert len(expected) == count
    if not streaming:
        assert data.train_tokens == sum(map(len, expected))
    elif how != "keep":
        first = [batch["input_ids"][0] for (batch, _), _ in zip(data.train, range(3), strict=False)]
        joined = [max(token, ~token) for row in expected for token in row][: 3 * block]
        assert torch.cat(first).tolist()[: len(joined)] == joined


def test_chats_need_a_file_and_a_tokenizer():
    for options in ({"tokenizer_name": "a"}, {"tokenizer_name": "a", "dataset_name": "synthetic"}):
        with pytest.raises(ValueError, match="--assistant_only_loss reads chats: name them with --train_file"):
            DataConfig(assistant_only_loss=True, **options)
    with pytest.raises(ValueError, match="--assistant_only_loss teaches a model that knows the language"):
        DataConfig(assistant_only_loss=True, train_file="a.jsonl")
