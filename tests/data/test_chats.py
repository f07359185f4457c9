"""Chats: their files, the two ways to find the assistant's tokens, and the batches made of them."""

import datetime
import json
from itertools import groupby, islice
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from datasets import Dataset
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


@pytest.fixture
def tokenizer():
    found = train_tokenizer([json.dumps(chat) for chat in CHATS], 400)
    found.add_tokens(["<|user|>", "<|assistant|>", "<|system|>", "<|end|>"], special_tokens=True)
    return found


def learned(tokenizer, tokens: list[int]) -> list[str]:
    """The texts of the runs of learned tokens."""
    texts = []
    for is_learned, run in groupby(tokens, key=lambda token: token >= 0):
        if is_learned:
            texts.append(tokenizer.decode(list(run)))
    return texts


def read_ids(tokens: list[int]) -> list[int]:
    """The token ids, learned or not."""
    return [max(token, ~token) for token in tokens]


def encoded(tokenizer, chat: list[dict]) -> list[int]:
    """The tokens of a chat: an id, or ~id where it is read and not learned."""
    (tokens,) = make_chat_encoder(tokenizer)([json.dumps(chat)])
    return tokens


def test_the_turns_of_the_assistant_are_learned_with_their_end(tokenizer):
    by_template = {}
    for template in (MARKED, PLAIN, PLAIN_TEMPLATE):
        tokenizer.chat_template = template
        tokens = encoded(tokenizer, CHATS[0])
        end = tokenizer.eos_token if template == PLAIN_TEMPLATE else "<|end|>"
        texts = [text.strip() for text in learned(tokenizer, tokens)]
        assert texts == [f"It is 1.{end}", f"It is 2, as you know.{end}"]
        assert tokenizer.decode(read_ids(tokens)) == tokenizer.apply_chat_template(CHATS[0], tokenize=False)
        by_template[template] = tokens
    assert by_template[MARKED] == by_template[PLAIN]


def test_a_template_that_shows_no_turns_or_fails_is_refused(tokenizer):
    # As templates that leave out what the assistant thought before the last turn.
    shorten = "{{ m.content }}", "{{ m.content if loop.last else 'short' }}"
    tokenizer.chat_template = MARKED.replace(*shorten)
    assert "short<|end|>" in learned(tokenizer, encoded(tokenizer, CHATS[0]))[0]
    tokenizer.chat_template = PLAIN.replace(*shorten)
    with pytest.raises(ValueError, match="--assistant_only_loss: .* writes a turn anew"):
        encoded(tokenizer, CHATS[0])
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(ValueError, match="roles must alternate"):
        encoded(tokenizer, CHATS[0])


def rows_of(folder: Path, rows: list[dict], kind: str = "jsonl") -> str:
    """The name of a new file, or folder of `save_to_disk`, with the rows."""
    path = folder / f"rows.{kind}"
    if kind == "folder":
        Dataset.from_list(rows).save_to_disk(path)
    elif kind == "parquet":
        pyarrow.parquet.write_table(pa.Table.from_pylist(rows), path)
    elif kind == "json":
        path.write_text(json.dumps(rows))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def chat_config(name: str, **options) -> DataConfig:
    """The configuration of a file or folder of chats."""
    flag = "dataset_name" if name.endswith(".folder") else "train_file"
    return DataConfig(**{flag: name, "assistant_only_loss": True, "tokenizer_name": "any"} | options)


@pytest.mark.parametrize("kind, streaming", [("parquet", True), ("folder", False)])
def test_chats_of_files_and_data_sets_become_batches(tmp_path, tokenizer, kind, streaming):
    tokenizer.chat_template = MARKED
    save_tokenizer(tokenizer, tmp_path / "tokenizer")
    rows = [{"messages": chat, "id": index} for index, chat in enumerate(CHATS)]
    options = {"tokenizer_name": str(tmp_path / "tokenizer"), "block_size": 64, "per_device_train_batch_size": 2}
    data = build_data(chat_config(rows_of(tmp_path, rows, kind), streaming=streaming, **options))
    batches = [batch for batch, _ in islice(data.train, 4)]
    for batch in batches:
        predicted = batch["labels"] >= 0
        assert torch.equal(torch.where(predicted, batch["input_ids"], -100), batch["labels"])
        assert 0.1 < predicted.float().mean() < 0.7
        # Positions begin anew with every chat.
        assert (batch["position_ids"][:, 1:] == 0).any()
    labels = batches[0]["labels"]
    shown = tokenizer.decode(labels[labels >= 0])
    assert "It is" in shown and "Count" not in shown and "Next?" not in shown
    assert len(data.validation)


def test_a_second_process_finds_the_tokens_in_the_cache(tmp_path, tokenizer):
    tokenizer.chat_template = MARKED
    save_tokenizer(tokenizer, tmp_path)
    first, second = (Hasher.hash(make_chat_encoder(load_tokenizer(str(tmp_path)))) for _ in range(2))
    assert first == second


def test_a_file_of_one_chat_is_no_table_of_columns(tmp_path):
    found = load_files([rows_of(tmp_path, [{"messages": CHATS[0]}])], "--train_file", chats=True)
    assert found["text"][:] == [chat_text(CHATS[0])]


def test_no_row_is_lost_to_half_characters_dates_or_empty_tools(tokenizer):
    tokenizer.chat_template = PLAIN_TEMPLATE
    chat = [{"role": "user", "content": "a\ud800"}, {"role": "assistant", "content": "b\udc00c"}]
    (tokens,) = make_chat_encoder(tokenizer)([chat_text(chat)])
    assert learned(tokenizer, tokens) == ["b?c<|endoftext|>"]
    chat = [{"role": "assistant", "content": "b", "at": datetime.date(2026, 1, 2)}]
    assert json.loads(chat_text(chat))[0]["at"] == "2026-01-02"
    assert chat_text(CHATS[0], tools=[]) == chat_text(CHATS[0], tools="[]") == json.dumps(CHATS[0])


@pytest.mark.parametrize("kind", ["jsonl", "folder"])
def test_the_chats_of_sharegpt_are_read_from_their_column(tmp_path, kind):
    names = {"user": "human", "assistant": "gpt", "system": "system"}
    rows = []
    for chat in CHATS:
        turns = [{"from": names[message["role"]], "value": message["content"]} for message in chat]
        rows.append({"conversations": turns})
    sources = open_sources(chat_config(rows_of(tmp_path, rows, kind)))
    found = [*sources.train["text"], *sources.validation["text"]]
    assert sorted(found) == sorted(map(json.dumps, CHATS))


def test_chats_that_are_none_are_bad_rows(tmp_path):
    rows = [{"messages": chat} for chat in (CHATS[0], [], CHATS[0][:2], "a", CHATS[1])]
    name = rows_of(tmp_path, [*rows, {"text": "a"}])
    with pytest.raises(ValueError, match="rows.jsonl, row 2, "):
        open_sources(chat_config(name))
    with pytest.warns(UserWarning, match="4 of 6 rows"):
        sources = open_sources(chat_config(name, on_bad_rows="skip"))
    assert len(sources.train) + len(sources.validation) == 2
    with pytest.raises(ValueError, match="'messages'.* text"):
        open_sources(chat_config(rows_of(tmp_path, [{"text": "a"}], "folder")))


def test_the_usual_names_of_roles_are_mapped(tmp_path):
    for name, role in (("chatgpt", "assistant"), ("model", "assistant"), ("human", "user")):
        chat = [{"from": name, "value": "a"}, {"role": name, "content": "b"}, {"from": "gpt", "value": "c"}]
        roles = [message["role"] for message in json.loads(chat_text(chat))]
        assert roles == [role, role, "assistant"]


@pytest.mark.parametrize("template", [MARKED, PLAIN])
def test_turns_of_weight_0_are_read_and_not_learned(tokenizer, template):
    tokenizer.chat_template = template
    system, question, answer, *_, last = CHATS[0]
    chat = [system, question, answer | {"weight": 0}, question, last | {"weight": 1}]
    whole = encoded(tokenizer, [system, question, answer, question, last])
    (found,) = make_chat_encoder(tokenizer)([chat_text(chat)])
    assert read_ids(found) == read_ids(whole)
    assert learned(tokenizer, found) == learned(tokenizer, whole)[1:]
    for weight, words in ((0, "no chat with a turn of the assistant"), (0.5, "weight 0.5")):
        with pytest.raises(BadChat, match=words):
            chat_text([question, answer | {"weight": weight}])


@pytest.mark.parametrize("template", [MARKED, PLAIN, PLAIN_TEMPLATE])
def test_content_is_text_whatever_it_spells(tokenizer, template):
    """The tokens of each content are those of plain text, and the marks are as many as without such words."""
    tokenizer.chat_template = template
    spelled = "It ends<|end|>\n<|user|> here <|endoftext|>"
    special = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    text = plain_ids(tokenizer, spelled)
    assert not special & set(text) and tokenizer.decode(text) == spelled
    plain = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    chat = [{"role": "user", "content": f"x{spelled}"}, {"role": "assistant", "content": f"y{spelled}"}]
    expected = encoded(tokenizer, plain)
    found = encoded(tokenizer, chat)
    marks = [token for token in found if max(token, ~token) in special]
    assert marks and marks == [token for token in expected if max(token, ~token) in special]
    assert len(found) == len(expected) + 2 * len(text)
    answer = learned(tokenizer, expected)[0].strip()
    assert learned(tokenizer, found)[0].strip() == answer.replace("y", f"y{spelled}")
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
    found = encoded(tokenizer, chat)
    assert read_ids(found) == expected["input_ids"]
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
    row = {"messages": WITH_TOOLS, "tools": tools}
    if kind == "parquet":
        *before, last = WITH_TOOLS
        row = {"messages": [*before, last | {"content": "noon"}], "tools": json.dumps(tools)}
    files = [rows_of(tmp_path, [row], kind)]
    (text,) = load_files(files, "--train_file", chats=True, template=ChatTemplate(tokenizer))["text"]
    (tokens,) = make_chat_encoder(tokenizer)([text])
    # The arguments are an object, which the template writes as JSON.
    called = 'now {"zone": null}|'
    whole = f"[now][then]user: time?|assistant: {called}tool: 12|assistant: noon|"
    assert tokenizer.decode(read_ids(tokens)) == whole
    assert [run.strip() for run in learned(tokenizer, tokens)] == [called, "noon|"]


# As most templates of small models: the content of a turn alone.
CONTENT = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
CALL = {"type": "function", "function": {"name": "now", "arguments": {}}}


@pytest.mark.parametrize("template", [MARKED, CONTENT])
@pytest.mark.parametrize(
    "turn, words",
    [
        ({"role": "assistant", "value": "It is 1."}, "assistant with value"),
        ({"role": "assistant", "text": "It is 1.", "id": 3}, "assistant with id and text"),
        ({"role": "assistant", "content": "", "tool_calls": [CALL]}, "assistant with tool_calls"),
        ({"role": "assistant", "content": None, "function_call": CALL["function"]}, "assistant with function_call"),
    ],
)
def test_a_turn_that_the_template_does_not_write_is_bad(tokenizer, template, turn, words):
    tokenizer.chat_template = template
    for chat in ([CHATS[0][1], turn], [CHATS[0][1], turn, *CHATS[1][1:]]):
        with pytest.raises(ValueError, match=f"{words}, of which the tokenizer's chat template writes nothing"):
            chat_text(chat, None, ChatTemplate(tokenizer))
    # A template may write more than it names.
    tokenizer.chat_template = CONTENT.replace("m.content", "m | tojson")
    assert chat_text([CHATS[0][1], turn], None, ChatTemplate(tokenizer))


def test_a_template_that_writes_the_present_day_is_warned_of(tmp_path, tokenizer):
    tokenizer.chat_template = "{{ strftime_now('%d %b %Y') }}" + MARKED
    save_tokenizer(tokenizer, tmp_path / "tokenizer")
    name = rows_of(tmp_path, [{"messages": chat} for chat in CHATS])
    with pytest.warns(UserWarning, match="writes the present day"):
        build_data(chat_config(name, tokenizer_name=str(tmp_path / "tokenizer"), block_size=64))


def test_tools_and_system_prompts_that_are_not_read_are_warned_of(tmp_path, tokenizer):
    tokenizer.chat_template = CONTENT
    row = {"conversations": CHATS[0], "tools": [CALL], "system": "Be brief."}
    with pytest.warns(UserWarning) as caught:
        load_files([rows_of(tmp_path, [row])], "--train_file", chats=True, template=ChatTemplate(tokenizer))
    warned = " ".join(str(warning.message) for warning in caught)
    assert "writes no tools" in warned and "rows.jsonl has a column 'system'" in warned


def test_a_vocabulary_with_gaps_is_encoded_as_without(tokenizer):
    tokenizer.chat_template = MARKED
    file = json.loads(tokenizer.backend_tokenizer.to_str())
    entries = file["model"]["vocab"]
    moved = {index: index + 9 * (index > 300) for index in tokenizer.get_vocab().values()}
    for entry, index in entries.items():
        entries[entry] = moved[index]
    for token in file["added_tokens"]:
        # Outside the vocabulary it would get another id.
        token["id"] = entries[token["content"]] = moved[token["id"]]
    names = {"eos_token": tokenizer.eos_token, "chat_template": MARKED}
    with_gap = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(file)), **names)
    for chat in CHATS[:9]:
        expected = [moved[index] for index in read_ids(encoded(tokenizer, chat))]
        assert read_ids(encoded(with_gap, chat)) == expected


def test_what_precedes_the_words_of_a_first_turn_is_not_learned(tokenizer):
    tokenizer.chat_template = "{% if messages[0].role != 'system' %}system: Help.<|end|>{% endif %}" + CONTENT
    chat = [CHATS[0][2], *CHATS[1][1:3]]
    (tokens,) = make_chat_encoder(tokenizer)([json.dumps(chat)])
    said = [message["content"] for message in chat if message["role"] == "assistant"]
    assert [run.strip() for run in learned(tokenizer, tokens)] == [f"{words}<|end|>" for words in said]


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_json_in_a_column_is_what_it_says(tmp_path, kind):
    """As `datasets` and DuckDB keep values that differ from row to row."""
    parts = [{"type": "text", "text": "It is"}, {"type": "text", "text": " 1."}]
    chats = [[CHATS[0][1], {"role": "assistant", "content": content}] for content in ("It is 1.", parts)]
    contents = [json.dumps(message["content"]) for chat in chats for message in chat]
    as_json = pa.ExtensionArray.from_storage(pa.json_(), pa.array(contents))
    turns = pa.StructArray.from_arrays([pa.array(["user", "assistant"] * 2), as_json], ["role", "content"])
    tools = pa.ExtensionArray.from_storage(pa.json_(), pa.array([json.dumps([CALL]), None]))
    table = pa.table({"messages": pa.ListArray.from_arrays([0, 2, 4], turns), "tools": tools})
    file = tmp_path / f"rows.{kind}"
    if kind == "parquet":
        pa.parquet.write_table(table, file)
    else:
        with pa.OSFile(str(file), "wb") as opened, pa.ipc.new_stream(opened, table.schema) as stream:
            stream.write_table(table)
    first, second = map(json.loads, load_files([str(file)], "--train_file", chats=True)["text"])
    assert first == {"messages": chats[0], "tools": [CALL]} and second == chats[0]


def test_one_bad_chat_is_named_or_left_out(tmp_path, tokenizer):
    tokenizer.chat_template = MARKED + "{{ raise_exception('not this') if messages[0].content == 'refuse' }}"
    template = ChatTemplate(tokenizer)
    good = [json.dumps(CHATS[0]), json.dumps(CHATS[2])]
    for message, reason in (
        ({"role": "user", "content": None}, "without content"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": "a"}]}, "no text .image_url"),
        ({"role": "narrator", "content": "a"}, "'narrator'"),
        ({"content": "a"}, "without a role"),
        ({"role": "user", "content": "refuse"}, "template fails .not this"),
    ):
        rows = [{"messages": CHATS[0]}, {"messages": [message, *CHATS[1]]}, {"messages": CHATS[2]}]
        files = [rows_of(tmp_path, rows)]
        for streaming in (False, True):
            options = {"chats": True, "template": template, "streaming": streaming}
            with pytest.raises(ValueError, match=f"rows.jsonl, row 2, .*{reason}"):
                list(load_files(files, "--train_file", **options))
            with pytest.warns(UserWarning, match="1 of 3 rows"):
                found = list(load_files(files, "--train_file", on_bad_rows="skip", **options))
            assert [row["text"] for row in found if row["text"]] == good


@pytest.mark.parametrize("how, streaming", [("keep", False), ("cut", True), ("drop", False), ("drop", True)])
def test_chats_longer_than_a_block_are_kept_cut_or_left_out_and_counted(tmp_path, tokenizer, how, streaming):
    tokenizer.chat_template = MARKED
    save_tokenizer(tokenizer, tmp_path / "tokenizer")
    long = [CHATS[0][1], CHATS[0][2] | {"content": "It is 1. " * 40}]
    chats = [chat[1:3] for chat in CHATS[1:12]] + [long]
    rows = make_chat_encoder(tokenizer)(list(map(json.dumps, chats)))
    assert len(rows[11]) > 128 and max(map(len, rows[:11])) < 64
    expected = {"keep": rows, "cut": [*rows[:11], rows[11][:64]], "drop": rows[:11]}[how]
    name = rows_of(tmp_path, [{"messages": chat} for chat in chats])
    config = chat_config(
        name,
        validation_file=name,
        tokenizer_name=str(tmp_path / "tokenizer"),
        long_chats=how,
        streaming=streaming,
        shuffle_buffer_size=1,
        per_device_train_batch_size=1,
        block_size=64,
    )
    with pytest.warns(UserWarning, match="1 of 12 chats"):
        data = build_data(config)
    if streaming:
        read = torch.cat([batch["input_ids"][0] for batch, _ in islice(data.train, 3)])
        assert read.tolist() == read_ids(sum(expected + expected, []))[: 3 * 64]
    else:
        assert data.train_tokens == sum(map(len, expected))
