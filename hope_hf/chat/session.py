"""The lines that a user types: messages, and commands that begin with a slash."""

import sys
from collections.abc import Iterator
from contextlib import suppress

from hope_hf.common.files import at_home
from hope_hf.common.parser import nearest
from hope_hf.common.process import print_error

from .conversation import Conversation
from .files import text_of
from .flags import Arguments
from .memory import Memory
from .reading import learned_size, read_text

COMMANDS = {
    "/read": "FILE  read a file",
    "/undo": "take back the last message and its answer, the last file, or /forget",
    "/forget": "drop what the levels have learned; what was read stays known",
    "/state": "show what was read and learned, its size, and the speed",
    "/source": "show the passages that were read again for the last answer, and where they stand",
    "/save": "write --memory now",
    "/help": "show this list",
    "/quit": "save --memory and end, as Ctrl-D does",
}
HELP = "\n".join(f"{name:8} {what}" for name, what in COMMANDS.items())


class Session:
    """A conversation on the terminal, or in a pipe.

    Answers and reports go to standard output, the rest to standard error.
    """

    def __init__(self, conversation: Conversation, args: Arguments, memory: Memory | None):
        self.conversation, self.args, self.memory = conversation, args, memory

    def run(self, texts: dict[str, str]) -> None:
        """Read the files, then answer the messages of `--prompt`, or else those of standard input.

        Whatever ends it, also an error or Ctrl-C, the memory is saved; it never holds a part of a file or turn.

        Args:
            texts: what each file of `--file` holds.

        Raises:
            ValueError: a file or message cannot be read; typed messages go on after it.
        """
        try:
            for path, text in texts.items():
                print(read_text(self.conversation, path, text, self.args.compare), flush=True)
            for prompt in self.args.prompt or ():
                self.conversation.say(prompt)
            if not self.args.prompt:
                self._converse()
        except KeyboardInterrupt:
            # ends the line of an answer
            print(flush=True)
            raise
        finally:
            if self.memory is not None and self.conversation.has_begun:
                self._save()

    def _converse(self) -> None:
        is_typed = sys.stdin.isatty()
        if is_typed:
            self._greet()
        for line in _typed() if is_typed else _piped():
            try:
                if self._obey(line):
                    return
                if is_typed and line.strip() and not line.startswith("/"):
                    self._report(f"[{self.conversation.last}; state {self.conversation.state_size}]")
            except ValueError as error:
                if not is_typed:
                    raise
                print_error(error, 2)

    def _greet(self) -> None:
        model = self.conversation.model
        levels = "its levels learn" if self.conversation.learn else "its levels are frozen (no --learn)"
        size, dtype = f"{model.num_parameters() / 1e6:,.1f} M parameters", str(model.dtype).removeprefix("torch.")
        self._report(f"{self.args.model}: {size} in {dtype}, {levels}; {self._tokens()} read.")
        self._report("Type a message; /help lists the commands, Ctrl-D ends.")

    def _obey(self, line: str) -> bool:
        """Do what a line asks; returns whether it ends the conversation."""
        if not line.startswith("/"):
            if line.strip():
                self.conversation.say(line.strip())
            return False
        name, _, argument = line.strip().partition(" ")
        argument = argument.strip()
        if name not in COMMANDS:
            hint = nearest(name, COMMANDS) or "."
            raise ValueError(f"there is no command {name}{hint} /help lists them; a message may begin with a space.")
        if argument and name != "/read":
            raise ValueError(f"{name} takes no argument: leave {argument!r} out.")
        match name:
            case "/read":
                self._read(argument)
            case "/undo":
                self.conversation.undo()
                self._report(f"Back at {self._tokens()}.")
            case "/forget":
                size = self.conversation.forget()
                self._report(f"Dropped {size / 1e6:,.1f} MB that the levels had learned.")
            case "/state":
                print(self._state(), flush=True)
            case "/source":
                print(self._sources(), flush=True)
            case "/save":
                if self.memory is None:
                    raise ValueError("/save needs a folder: start with --memory FOLDER.")
                self._save()
            case "/help":
                print(HELP, flush=True)
        return name == "/quit"

    def _read(self, file: str) -> None:
        if not file:
            raise ValueError("/read needs the name of a file: /read FILE.")
        path = at_home(file)
        print(read_text(self.conversation, path, text_of(path, "/read"), self.args.compare), flush=True)

    def _state(self) -> str:
        conversation = self.conversation
        levels = conversation.cache.levels
        lines = [
            f"read     {self._tokens()}",
            f"state    {conversation.state_size}",
            f"archive  {conversation.archive_bytes / 1e6:,.2f} MB",
        ]
        if levels is None:
            lines.append("learned  nothing")
        else:
            tokens, steps = int(levels.tokens), int(levels.steps.sum())
            lines.append(f"learned  from {tokens:,} tokens: {steps:,} steps, {learned_size(conversation)}")
        if conversation.last is not None:
            lines.append(f"speed    {conversation.last}")
        return "\n".join(lines)

    def _sources(self) -> str:
        if not self.args.recall:
            raise ValueError("/source shows what --recall has found: start with --recall.")
        sources = self.conversation.sources
        if not sources:
            return "No passage was read again for the last answer."
        lines = []
        for number, passage in enumerate(sources, 1):
            lines.append(f"{number}. tokens {passage.start:,} to {passage.stop:,}: {' '.join(passage.text.split())}")
        return "\n".join(lines)

    def _tokens(self) -> str:
        return f"{self.conversation.cache.get_seq_length():,} tokens"

    def _save(self) -> None:
        size = self.memory.save(self.conversation)
        self._report(f"Saved {self._tokens()} in {self.memory.folder} ({size / 1e6:,.1f} MB).")

    @staticmethod
    def _report(text: str) -> None:
        print(text, file=sys.stderr, flush=True)


def _typed() -> Iterator[str]:
    """Lines of the terminal, after a prompt, until Ctrl-D."""
    # with it `input` has a history and edits lines; not every system has it
    with suppress(ImportError):
        import readline  # noqa: F401
    while True:
        try:
            yield input("> ")
        except EOFError:
            print()
            return


def _piped() -> Iterator[str]:
    for line in sys.stdin:
        yield line.removesuffix("\n")
