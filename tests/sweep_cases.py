"""Command lines that try every flag of every program with values that nobody should give."""

import argparse

NUMBERS = ["", "one", "-1", "0", "0.5", "nan", "inf", "-inf", "1e300", "1e-300", "1" + "0" * 22, "4294967296", "9" * 5000]
WORDS = ["", " ", "nan", "-1", "[" * 5000, "{" * 5000, "&a [*a]", "a" * 300, "\udcff"]


def cases(parser: argparse.ArgumentParser, folder) -> list[list[str]]:
    """Every option of the parser with every value of its kind, and twice; positional words are left to the caller.

    `folder` holds the folder `empty`, the file `junk` of bytes that are no text, and nothing named `missing`.
    """
    paths = [f"{folder}/{name}" for name in ("missing/x", "empty", "junk", "junk/x", "n" * 300)] + ["/proc/q", "/dev/null"]
    found = []
    for action in parser._actions:
        if not action.option_strings or action.dest == "help":
            continue
        flag = action.option_strings[0]
        if action.nargs == 0:
            values = [[f"{flag}=1"], [flag, "word"]]
        elif action.nargs == "?":
            values = [[flag, value] for value in ("", "maybe", "2", "nan", "-1", "true")]
        elif action.type in (int, float):
            values = [[flag, value] for value in NUMBERS]
        else:
            values = [[flag, value] for value in WORDS + paths]
        found += [*values, [flag, "--no_such_flag"]]
    return found
