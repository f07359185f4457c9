"""Fine-tuning on chats by `recipes/chat.yaml`, and LoRA."""

import json
from types import SimpleNamespace

import pytest
import torch
from peft import PeftModel
from training_runs import ROOT, curve, forget_the_end
from transformers import AutoModelForCausalLM, AutoTokenizer

from hope_hf.common.adapters import require_peft_for_training
from hope_hf.common.flags import ModelArguments
from hope_hf.common.models import load_config
from hope_hf.common.run_arguments import Arguments
from hope_hf.common.weights import load_model
from hope_hf.evaluation import main as evaluate
from hope_hf.export.folder import load_source
from hope_hf.training.parsing import parse
from hope_hf.training.setup import _warn_of_few_steps

# PEFT and TRL ask transformers 5.23 for attributes by their older names.
pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning")
RECIPE = str(ROOT / "recipes/chat.yaml")
CHATS = [
    [{"role": "user", "content": f"abc {n} def?"}, {"role": "assistant", "content": "abc abc def def " * (1 + n % 3)}]
    for n in range(60)
]


@pytest.fixture
def chats(tmp_path):
    file = tmp_path / "chats.jsonl"
    file.write_text("".join(json.dumps({"messages": chat, "note": chat[1]["content"]}) + "\n" for chat in CHATS))
    return ["--train_file", str(file)]


def load(folder):
    config = load_config(str(folder), "model_name_or_path", ModelArguments())
    return load_model(str(folder), config, "DIR")


@pytest.mark.parametrize(
    "words, sentence",
    [
        (["--model_type", "llama"], "--lora_rank adapts a trained model: name it with --model_name_or_path"),
        (["--model_name_or_path", "a", "--train_only", "memories"], "leave --train_only memories out"),
        (["--model_name_or_path", "a", "--init", "sharded"], "leave --init sharded out"),
        (["--model_name_or_path", "a", "--push_to_hub"], "leave --push_to_hub out"),
    ],
)
def test_lora_is_refused_where_it_cannot_be(words, sentence):
    with pytest.raises(ValueError, match=sentence):
        parse(["--output_dir", "x", "--lora_rank", "4", *words])


def test_the_recipe_teaches_a_model_to_answer_and_resumes(run, trained, tmp_path, chats, capsys):
    model = [RECIPE, "--model_name_or_path", str(trained("hope").folder)]
    flags = ["--gradient_accumulation_steps", "1", "--checkpointing_steps", "4"]
    status, rows = run("chat", *flags, model=model, data=chats)
    losses = curve(rows)
    assert status == 0 and losses[-1] < losses[0] - 0.3 and rows[-1]["eval/loss"] < losses[0] - 0.3
    assert f"hope-hf chat {tmp_path / 'chat'}\n" in capsys.readouterr().out
    assert "Assistant: " in AutoTokenizer.from_pretrained(tmp_path / "chat").chat_template
    forget_the_end(tmp_path / "chat", 8)
    status, again = run("chat", *flags, model=model, data=chats)
    assert status == 0 and curve(again)[-4:] == losses[-4:]

    # Its own held-out chats, as text.
    capsys.readouterr()
    assert evaluate(["--model_name_or_path", str(tmp_path / "chat"), "--suite", "sample"]) == 0
    assert "User: abc" in capsys.readouterr().out


def test_a_loaded_model_with_few_steps_an_epoch_gets_a_warning(recwarn):
    """However many steps the run has: 60 KB of chats must not be read in three large steps."""
    data = SimpleNamespace(block_size=1024, train_tokens=100_000)
    args = Arguments(model_name_or_path="runs/demo", max_train_steps=120)
    _warn_of_few_steps(args, data, tokens_per_step=1024, total_steps=120)
    assert not recwarn.list
    with pytest.warns(UserWarning, match="An epoch has 6 step"):
        _warn_of_few_steps(args, data, tokens_per_step=16 * 1024, total_steps=120)


def test_lora_trains_is_saved_as_an_adapter_resumes_and_is_evaluated(run, trained, tmp_path, chats):
    base = trained("hope").folder
    before = (base / "model.safetensors").read_bytes()
    model = [RECIPE, "--model_name_or_path", str(base), "--lora_rank", "4"]
    flags = ["--gradient_accumulation_steps", "1", "--checkpointing_steps", "4", "--learning_rate", "3e-2"]
    status, rows = run("lora", *flags, model=model, data=chats)
    losses = curve(rows)
    assert status == 0 and losses[-1] < losses[0] - 0.3
    for folder in (tmp_path / "lora", tmp_path / "lora" / "checkpoint-8"):
        assert not (folder / "model.safetensors").exists() and not (folder / "config.json").exists()
        config = json.loads((folder / "adapter_config.json").read_text())
        assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (4, 8, str(base))
    forget_the_end(tmp_path / "lora", 8)
    status, again = run("lora", *flags, model=model, data=chats)
    assert status == 0 and curve(again)[-4:] == losses[-4:] and again[-1]["eval/loss"] == rows[-1]["eval/loss"]
    assert (base / "model.safetensors").read_bytes() == before

    ids = torch.arange(24).view(2, 12)
    expected = PeftModel.from_pretrained(load(base), tmp_path / "lora").eval()(input_ids=ids).logits
    assert (expected - load(base)(ids).logits).abs().max() > 1e-2
    # As we load it, as transformers itself does, and as it is exported.
    direct = AutoModelForCausalLM.from_pretrained(tmp_path / "lora").eval()
    for adapted in (load(tmp_path / "lora"), direct, load_source(tmp_path / "lora")[0]):
        torch.testing.assert_close(adapted(ids).logits, expected, rtol=0, atol=1e-5)


def test_peft_is_needed_in_a_version_that_transformers_takes(monkeypatch):
    require_peft_for_training()
    with monkeypatch.context() as patch:
        patch.setattr("transformers.integrations.peft.MIN_PEFT_VERSION", "99.0")
        with pytest.raises(ValueError, match="PEFT 99.0 .*pip install -U peft"):
            require_peft_for_training()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="--lora_rank needs PEFT: pip install peft"):
        require_peft_for_training()
