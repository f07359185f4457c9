"""`hope-hf chat`: files, lines and commands, the memory's folder, and one sentence for each mistake."""

import json
import sys
from pathlib import Path

import pytest

from hope_hf import HopeCache
from hope_hf.chat import conversation, main, session
from hope_hf.chat.memory import Memory

TEXT = "w10 w11 w12 w13 w14 w15 w16 w17 w18 w19"


@pytest.fixture
def book(tmp_path):
    path = tmp_path / "book.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


def files_of(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def refused(result: tuple[int, str, str]) -> str:
    """The one sentence of a program that has ended with an error."""
    status, _, errors = result
    lines = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert status == 2 and len(lines) == 1 and lines[0][-1] in ".?"
    return lines[0]


def test_files_and_messages_are_read_and_the_memory_is_saved(chat, book, tmp_path):
    words = ["--learn", "--compare", "--memory", tmp_path / "memory", "--file", book, "--prompt", "w20 w21", "w22"]
    status, out, errors = chat(*words)
    assert status == 0 and "Saved" in errors
    assert out.startswith("book.txt: 10 tokens") and "took 1 step;" in out
    assert len(out.rstrip().splitlines()[-2:]) == 2
    found = json.loads((tmp_path / "memory" / "chat.json").read_text())
    assert [message["content"] for message in found["messages"]][::2] == ["w20 w21", "w22"]


def test_commands(chat, book, tmp_path):
    lines = ["w10 w11", "/state", "/undo", "/state", f"/read {book}", "/state", "/forget", "/state", "/help", "/save"]
    status, out, errors = chat("--learn", "--memory", tmp_path / "m", typed="\n".join([*lines, "", "/quit", "w12"]))
    assert status == 0
    tokens = [line.split()[1] for line in out.splitlines() if line.startswith("read ")]
    # 4 of the template and 5 of the answer's 6
    assert tokens == ["10", "0", "10", "10"]
    learned = [line.split(None, 1)[1] for line in out.splitlines() if line.startswith("learned ")]
    assert learned[0].startswith("from 5 tokens: 0 steps, drift 0.00 %")
    assert learned[2].startswith("from 10 tokens: 1 steps")
    assert learned[1] == learned[3] == "nothing"
    assert all(name in out for name in session.COMMANDS)
    assert errors.count("Saved 10 tokens") == 2


def test_a_command_in_a_pipe_that_fails_ends_the_program_and_saves(chat, tmp_path):
    for line, words in (
        ("/undo 2", "takes no argument"),
        ("/read", "/read FILE"),
        ("/read missing", "/read missing"),
        ("/save", "--memory FOLDER"),
    ):
        assert words in refused(chat(typed=f"w10\n{line}\nw11"))
    result = chat("--memory", tmp_path / "m", typed="w10\n/udno\nw11")
    assert "did you mean /undo?" in refused(result)
    assert len(json.loads((tmp_path / "m" / "chat.json").read_text())["messages"]) == 2


def test_a_typed_conversation_goes_on_after_a_mistake(folder, monkeypatch, capsys):
    lines = iter(["/nothing", "w10", ""])

    def typed(prompt):
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", typed)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    assert main([str(folder), "--max_new_tokens", "6"]) == 0
    out, errors = capsys.readouterr()
    assert "error: there is no command /nothing" in errors
    assert "its levels are frozen (no --learn); 0 tokens read." in errors and "/help lists the commands" in errors
    # the answer, and a line break after Ctrl-D
    assert len(out.splitlines()) == 2


def test_ctrl_c_drops_the_turn_and_saves_those_before(chat, tmp_path, monkeypatch):
    put, count = conversation.TextStreamer.put, []

    def interrupted(streamer, value):
        count.append(value)
        if len(count) == 9:
            raise KeyboardInterrupt
        put(streamer, value)

    monkeypatch.setattr(conversation.TextStreamer, "put", interrupted)
    status, _, errors = chat("--memory", tmp_path / "m", typed="w10\nw11\n")
    assert status == 130 and "stopped by Ctrl-C" in errors
    assert len(json.loads((tmp_path / "m" / "chat.json").read_text())["messages"]) == 2


def test_nothing_is_saved_where_nothing_was_read(chat, tmp_path):
    assert chat("--memory", tmp_path / "m", typed="\n \n") == (0, "", "")
    assert not (tmp_path / "m").exists()


def test_a_cache_of_another_program_begins_a_new_conversation(chat, tmp_path, model):
    assert chat("--memory", tmp_path / "m", typed="w10")[0] == 0
    cache = HopeCache(model.config)
    model.generate(max_new_tokens=3, cache=cache, bos_token_id=1)
    cache.save_pretrained(tmp_path / "m", model)
    assert chat("--memory", tmp_path / "m", typed="w11")[0] == 0
    assert json.loads((tmp_path / "m" / "chat.json").read_text())["messages"][0]["content"] == "w11"


def test_wrong_memories_are_refused_and_stay(chat, tmp_path, tiny_model):
    (tmp_path / "file").write_text("x")
    assert "is a file" in refused(chat("--memory", tmp_path / "file"))
    assert "holds no hope_cache" in refused(chat("--memory", tmp_path / "model"))
    memory = tmp_path / "m"
    assert chat("--memory", memory, typed="w10")[0] == 0
    for name, content in (("chat.json", b"["), ("hope_cache.safetensors", b"x")):
        before = (memory / name).read_bytes()
        (memory / name).write_bytes(content)
        assert "--memory" in refused(chat("--memory", memory, typed="w10"))
        assert (memory / name).read_bytes() == content
        (memory / name).write_bytes(before)
    before = files_of(memory)
    tiny_model(seed=1).save_pretrained(tmp_path / "model")
    assert "written by another model" in refused(chat("--memory", memory, typed="w10"))
    assert files_of(memory) == before


def test_a_model_trained_here_learns_with_the_defaults(chat, complete, folder, tmp_path, tiny_model):
    tiny_model().save_pretrained(folder)
    before = (folder / "config.json").read_bytes()
    memory = ["--memory", tmp_path / "m"]
    for run in (chat, complete):
        status, _, errors = run("--learn", *memory, "--prompt", "w10 w11")
        assert status == 0 and "its levels learn with the defaults" in errors
    status, out, _ = chat(*memory, typed="/state")
    assert status == 0 and "learned  from" in out
    assert (folder / "config.json").read_bytes() == before


def test_a_second_program_is_refused_before_it_reads(chat, complete, book, tmp_path):
    memory = ["--memory", tmp_path / "m"]
    assert chat(*memory, typed="w10")[0] == 0
    before = files_of(tmp_path / "m")
    with Memory(tmp_path / "m", "float32").locked():
        for result in (chat(*memory, "--file", book, typed="w11"), complete(*memory, "--prompt", "w11")):
            assert f"--memory {tmp_path / 'm'} is in use" in refused(result)
    assert files_of(tmp_path / "m") == before
    assert chat(*memory, typed="w11")[0] == 0


@pytest.mark.parametrize("name", ["chat.json", "hope_cache.safetensors"])
def test_a_memory_is_replaced_whole_or_not_at_all(chat, tmp_path, monkeypatch, name):
    assert chat("--memory", tmp_path / "m", typed="w10")[0] == 0
    before = files_of(tmp_path / "m")
    replace = Path.replace

    def fails(self, target):
        is_new = "before" not in self.name and ".tmp-" not in self.name
        if is_new and Path(target) == tmp_path / "m" / name:
            raise OSError(28, "No space left on device")
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", fails)
    assert "No space left" in refused(chat("--memory", tmp_path / "m", typed="w11"))
    assert files_of(tmp_path / "m") == before


def test_a_link_to_nothing_is_refused_before_the_book_is_read(chat, book, tmp_path):
    (tmp_path / "m").symlink_to(tmp_path / "nothing")
    for folder in (tmp_path / "m", tmp_path / "m" / "book"):
        status, out, errors = chat("--memory", folder, "--file", book)
        assert (status, out) == (2, "") and f"--memory {folder} cannot be written" in errors
