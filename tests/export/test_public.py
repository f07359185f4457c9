"""What may be on a public card: flags that are known to be public, no folders, and text that stays text."""

import re
from dataclasses import fields, replace
from typing import get_args, get_type_hints

from huggingface_hub import ModelCard

from hope_hf.common.run_arguments import GROUPS as TRAINING_FLAGS
from hope_hf.evaluation.flags import GROUPS as EVALUATION_FLAGS
from hope_hf.export.card import model_card
from hope_hf.export.facts import _markdown, read_training
from hope_hf.export.public import SHOWN, as_code_block, as_text, public_command, without_folders

# A shell line, and names that say nothing about the model.
PRIVATE = {"checkpoint_hook", "run_name", "project_name", "report_to", "archive_dir"}
NASTY = "a\n\n# b <script>|*c*`d`\r```\n[e](f) \udcff&amp;"


def test_every_flag_with_a_text_is_either_public_or_private():
    texts = set()
    for group in (*TRAINING_FLAGS, *EVALUATION_FLAGS):
        kinds = get_type_hints(group)
        for field in fields(group):
            kind = kinds[field.name]
            if {int, float, bool}.isdisjoint({kind, *get_args(kind)}):
                texts.add(field.name)
    assert texts - SHOWN == PRIVATE and SHOWN <= texts


def test_a_flag_that_may_be_private_is_left_out_in_every_spelling():
    for words in (
        ["--checkpoint_hook", "KEY=hidden"],
        ["--checkpoint-hook", "KEY=hidden"],
        ["--checkpoint-hook=KEY=hidden"],
        ["--checkpoint_hook", "-hidden", "hidden"],
        ["--another_flag=hidden", "hidden"],
        ["--<hidden>"],
    ):
        command = public_command(["/home/me/run_clm.py", "/home/me/mid.yaml", *words, "--seed", "7", "--streaming"])
        assert command == "python run_clm.py mid.yaml --seed 7 --streaming"
    # a value that looks like a flag
    assert "hidden" not in public_command(["run_clm.py", "--checkpoint-hook", "--KEY=hidden upload", "--my hidden"])


def test_the_command_has_one_spelling_and_file_names_without_folders():
    words = ["run_clm.py", "--train-file", "C:\\me\\my books\\*.txt", "--model-name-or-path=owner/name"]
    assert public_command(["/home/me/bin/hope-hf", "train", "--seed", "7"]) == "hope-hf train --seed 7"
    words += ["--init=sharded"]
    words += ["--config_overrides", "hidden_size=16,_name_or_path=/home/me/x", "--compare", "runs/a", "runs/b\nc"]
    assert public_command(words) == (
        "python run_clm.py --train_file '*.txt' --model_name_or_path=owner/name --init=sharded "
        "--config_overrides hidden_size=16,_name_or_path=x --compare a 'b c'"
    )


def test_absolute_paths_that_are_no_flag_s_value_lose_their_folders():
    flags = {"validation_file": "/home/me/my books/held out.txt"}
    for folder in ("/home/me/my books/", "/other/my books/", "~/", "D:\\me\\"):
        assert without_folders(f"Text: {folder}held out.txt", flags) == "Text: held out.txt"
    for text in ("bits/byte", "1/2 and 3/4", "a / b / c", "owner/name"):
        assert without_folders(text, {}) == text


def test_text_stays_text():
    assert as_text(NASTY) == r"a # b &lt;script&gt;\|\*c\*\`d\` \`\`\` \[e\](f) &amp;amp;"
    assert as_text("held_out.txt __init__ _a_") == r"held_out.txt \_\_init\_\_ \_a\_"
    assert as_code_block(NASTY) == "````\na # b <script>|*c*`d` ``` [e](f) &amp;\n````"
    assert as_code_block("a\nb", "c") == "```\na b\nc\n```"
    table = _markdown({f"Text: {NASTY}": [{NASTY: NASTY, "loss_a": 0.5, "loss_a_stderr": 0.25}]}, {}).splitlines()
    assert [line.count("|") - line.count(r"\|") for line in table] == [0, 0, 3, 3, 3]
    assert "0.5000 ± 0.2500" in table[-1]


def test_names_and_license_on_the_card_are_one_line_of_text(trained_run, tiny_model):
    facts = replace(read_training(trained_run), text=NASTY, commands=[NASTY], versions={NASTY: NASTY})
    card = model_card(tiny_model(), NASTY, f"{NASTY}\n---\n", facts, None)
    assert ModelCard(card.content).data.license == "a # b <script>|*c*`d` ``` [e](f) &amp; ---"
    outside = re.sub(r"^(`{3,}).*?^\1$", "", card.text, flags=re.DOTALL | re.MULTILINE)
    assert "<script>" not in outside and not re.search("^# b", outside, re.MULTILINE) and outside.count("&lt;") == 4
    # Encodes: no lone surrogate is left.
    card.content.encode()
