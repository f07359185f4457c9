"""Fine-tuning on chats by `recipes/chat.yaml`."""

import json
import warnings

import pytest
from training_runs import HOPE, LLAMA, ROOT, curve, forget_the_end
from transformers import AutoTokenizer

from hope_hf.training.parsing import parse

RECIPE = str(ROOT / "recipes/chat.yaml")
CHATS = [
    [{"role": "user", "content": f"abc {n} def?"}, {"role": "assistant", "content": "abc abc def def " * (1 + n % 3)}]
    for n in range(60)
]


@pytest.fixture
def chats(tmp_path):
    file = tmp_path / "chats.jsonl"
    file.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in CHATS))
    return ["--train_file", str(file)]


def test_the_recipe_is_read_without_a_warning(chats):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        args = parse([RECIPE])
    assert (args.output_dir, args.model_name_or_path, args.train_file) == ("runs/chat", "runs/demo", "chats.jsonl")
    assert args.assistant_only_loss and not args.trust_remote_code


@pytest.mark.parametrize("kind", [HOPE, LLAMA], ids=["hope", "llama"])
def test_the_recipe_teaches_a_model_to_answer_and_resumes(run, tmp_path, chats, kind):
    assert run("base", "--max_train_steps", "2", model=kind)[0] == 0
    model = [RECIPE, "--model_name_or_path", str(tmp_path / "base")]
    flags = ["--gradient_accumulation_steps", "1", "--checkpointing_steps", "4"]
    status, rows = run("chat", *flags, model=model, data=chats)
    losses = curve(rows)
    assert status == 0 and losses[-1] < losses[0] - 0.3 and rows[-1]["eval/loss"] < losses[0] - 0.3
    assert "Assistant: " in AutoTokenizer.from_pretrained(tmp_path / "chat").chat_template
    forget_the_end(tmp_path / "chat", 8)
    status, again = run("chat", *flags, model=model, data=chats)
    assert status == 0 and curve(again)[-4:] == losses[-4:]
