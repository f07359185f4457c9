"""Mistakes of the user: one sentence that names the flag or file, an exit status, and nothing overwritten."""

import errno
import json
import shutil

import pytest
from training_runs import EVERY_FOURTH, HOPE, HOPE_ATTENTION, HOPE_HYBRID, LLAMA, make_tokenizer

from hope_hf.common import process
from hope_hf.data import sources
from hope_hf.training import setup
from hope_hf.training.parsing import parse
from hope_hf.training.watch import process_files
from hope_hf.training.watch.monitor import Monitor


def refuse(run, capsys, words, name="a", **keywords):
    """Run with `keywords` and expect a refusal that contains `words`; returns the whole error."""
    status, _ = run(name, *keywords.pop("flags", []), **keywords)
    complaint = capsys.readouterr().err.strip().splitlines()[-1]
    assert status == 2
    assert complaint.startswith("error: ") and words in complaint
    return complaint


def hope(**fields) -> list[str]:
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "level_intermediate_sizes": [32], "level_periods": [256]}
    return ["--config_overrides", json.dumps(sizes | fields)]


CARRY = ["--document_boundary", "carry"]
MEMORIES = ["--train_only", "memories"]
# A model, and what the sentence names.
MODELS = [
    (hope(hiden_size=64), "did you mean hidden_size?"),
    (["--model_type", "llama", "--config_overrides", "num_layers=2"], "no field 'num_layers'"),
    (["--model_type", "lama"], "did you mean llama?"),
    (["--config_overrides", "hidden_size"], "--config_overrides 'hidden_size' cannot be read"),
    (["--config_overrides", "hidden_size=&a [*a]"], "cannot be read: write *a out"),
    (["--config_overrides", "hidden_size=64,hidden_size=32"], "a name comes twice"),
    (["--config_overrides", "hidden_size=064"], "write 064 as a decimal number"),
    (["--config_overrides", "hidden_size=" + "[" * 5000], "cannot be read"),
    (hope(hidden_size="wide"), "hidden_size"),
    (hope(vocab_size=10**10), "vocab_size is 10000000000"),
    (hope(memory_chunk_size=10**22), "memory_chunk_size"),
    (hope(level_periods=[256, 512]), "level_"),
    ([*LLAMA[:3], "num_attention_heads=0"], "--config_overrides: LlamaConfig"),
    ([*LLAMA[:3], LLAMA[3] + ",max_position_embeddings=16"], "--block_size 32"),
    ([*LLAMA, "--attn_implementation", "flesh"], "flesh"),
    ([*LLAMA, *CARRY], "--document_boundary reset"),
    ([*HOPE_ATTENTION, *CARRY], "the attention mixer has none"),
    ([*HOPE_HYBRID, *CARRY], "keys and values of all tokens"),
    ([*LLAMA, *MEMORIES], "--train_only memories: this llama"),
    ([*HOPE, "--level_optimizers", '{"7": {}}'], "--level_optimizers names level 7"),
    ([*HOPE, "--level_optimizers", "[" * 5000], "--level_optimizers is not JSON"),
    ([*LLAMA, "--report_to", "wandbb"], "did you mean wandb?"),
]


@pytest.mark.parametrize("model, words", MODELS)
def test_a_wrong_model_is_told_before_the_data_are_prepared(run, monkeypatch, capsys, tmp_path, model, words):
    monkeypatch.setattr(setup, "build_data", None)
    refuse(run, capsys, words, model=model)
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    "model, words",
    [(hope(vocab_size=100), "has ids up to 299"), (hope(pad_token_id=1000), "pad_token_id 1000"),
     (hope(hidden_size=64, memory_chunk_size=10**12), "The memory does not hold the run")],
)  # fmt: skip
def test_a_model_that_the_memory_does_not_hold_or_the_data(run, capsys, model, words):
    refuse(run, capsys, words, model=model)


def contents(folder) -> dict:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_folder_of_another_run(run, capsys, trained, tmp_path, corpus, monkeypatch):
    folder = trained("llama").copy(tmp_path / "a")
    before = contents(folder)
    refuse(run, capsys, "seed was 42 and is now 7", flags=[*EVERY_FOURTH, "--seed", "7"])
    refuse(run, capsys, "model_type was 'llama' and is now 'gpt2'", flags=[*EVERY_FOURTH, "--model_type", "gpt2"])
    with monkeypatch.context() as patch:
        # What `accelerate launch` sets for `mixed_precision: bf16`.
        patch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
        refuse(run, capsys, "mixed_precision was 'no' and is now 'bf16'", flags=EVERY_FOURTH)
    checkpoint = ["--resume_from_checkpoint", folder / "checkpoint-4"]
    wider = [*LLAMA[:3], LLAMA[3].replace("intermediate_size=64", "intermediate_size=96")]
    refuse(run, capsys, "config_overrides was", name="b", flags=checkpoint, model=wider)
    shutil.copy(corpus[1], tmp_path / "train.jsonl")
    with (tmp_path / "train.jsonl").open("a") as handle:
        handle.write('{"text": "one more document"}\n')
    data = ["--train_file", str(tmp_path / "train.jsonl"), *corpus[2:]]
    refuse(run, capsys, "--train_file: train.jsonl had", flags=EVERY_FOURTH, data=data)
    assert before == contents(folder) and not (tmp_path / "b").exists()


RECORD = "run.json cannot be read"


@pytest.mark.parametrize(
    "name, content, words",
    [
        ("config.json", "{}", "holds config.json but no run.json"),
        ("run.json", "[1]", RECORD),
        ("run.json", '{"identity": 5, "complete": false, "run_id": "a"}', RECORD),
        ("run.json", "[" * 9999, RECORD),
    ],
)
def test_a_folder_that_no_run_has_made(run, capsys, tmp_path, name, content, words):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / name).write_text(content)
    refuse(run, capsys, words)
    assert (tmp_path / "a" / name).read_text() == content


def test_the_folder_is_deleted_while_it_trains(run, capsys, tmp_path, monkeypatch):
    begins = Monitor.step_begins

    def delete(monitor, step):
        if step == 3:
            shutil.rmtree(tmp_path / "a")
        return begins(monitor, step)

    monkeypatch.setattr(Monitor, "step_begins", delete)
    refuse(run, capsys, "was deleted", flags=["--logging_steps", "9", "--checkpointing_steps", "4"])
    assert not (tmp_path / "a").exists()


def test_output_dir_is_a_file(run, capsys, tmp_path):
    (tmp_path / "a").write_text("mine")
    refuse(run, capsys, "is a file: name a folder")
    assert (tmp_path / "a").read_text() == "mine"


def test_a_checkpoint_that_cannot_be(run, capsys, trained, tmp_path):
    weights = trained("llama").copy(tmp_path / "a") / "checkpoint-4" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    for path, words in ((weights.parent, "model.safetensors has"), ("n" * 300, "is not a folder")):
        refuse(run, capsys, words, name="b", flags=["--resume_from_checkpoint", path])
    assert not (tmp_path / "b").exists()


def test_damaged_model_to_start_from(run, capsys, trained, tmp_path):
    """tests/evaluation/test_broken_models.py has all ways in which a model can be damaged."""
    folder = trained("llama").copy(tmp_path / "a")
    (folder / "model.safetensors").write_text("cut off")
    sentence = f"--model_name_or_path {folder} cannot be loaded"
    refuse(run, capsys, sentence, name="b", model=["--model_name_or_path", str(folder)])
    assert not (tmp_path / "b").exists()


def test_a_missing_file_and_one_of_a_single_document(run, capsys, tmp_path, corpus):
    missing, single = tmp_path / "missing.txt", tmp_path / "single.jsonl"
    single.write_text(json.dumps({"text": "alone" * 500}) + "\n")
    refuse(run, capsys, f"{missing} does not exist", data=["--train_file", str(missing), *corpus[4:]])
    refuse(run, capsys, "single.jsonl", data=["--train_file", str(single), *corpus[4:]])


def test_token_ids_out_of_range(run, capsys, monkeypatch):
    """Where the first process reads them, and where another one does, which says so itself."""
    # No tokenizer that fits gives such ids; a data set tokenized elsewhere may.
    monkeypatch.setattr(sources, "check_vocabulary", lambda tokenizer, vocab_size: None)
    model = [*LLAMA[:3], LLAMA[3] + ",vocab_size=60"]
    refuse(run, capsys, "the model's vocabulary of 60", model=model)
    monkeypatch.setattr(process, "launched_rank", lambda: "1")
    refuse(run, capsys, "the model's vocabulary of 60", model=model)


def test_block_longer_than_the_data(run, capsys, corpus):
    refuse(run, capsys, "--block_size", flags=["--block_size", "100000"], model=HOPE)


def test_tokenizer_larger_than_a_loaded_model(run, capsys, trained, tmp_path, corpus):
    tokenizer = make_tokenizer(["abab cdcd"], vocab_size=270)
    tokenizer.add_tokens([f"<{number}>" for number in range(60)])
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    data = [*corpus[:4], "--tokenizer_name", str(tmp_path / "tokenizer")]
    refuse(run, capsys, "--tokenizer_name", data=data, model=["--model_name_or_path", str(trained("llama").folder)])


@pytest.mark.parametrize(
    "error, words",
    [(OSError(errno.ENOSPC, "No space left on device"), "free space there"), (MemoryError(), "MemoryError")],
)
def test_what_fails_in_a_step_is_one_sentence(run, capsys, monkeypatch, error, words):
    def full(*_, **__):
        raise error

    monkeypatch.setattr(process_files.Heartbeat, "beat", full)
    refuse(run, capsys, words)


def test_flags_of_fsdp_without_it_warn(run):
    with pytest.warns(UserWarning, match="--fsdp_prefetch is ignored: the launch file asks for no FSDP"):
        run("a", "--fsdp_prefetch", "2", "--max_train_steps", "1")


def test_weights_that_no_engine_shares_out_are_saved_whole(run, tmp_path):
    with pytest.warns(UserWarning, match=r"--save_sharded is ignored: no weights are shared out \(one process\)"):
        status, _ = run("a", "--save_sharded", "--max_train_steps", "1")
    assert status == 0 and (tmp_path / "a" / "checkpoint-1" / "model.safetensors").exists()


def test_a_watchdog_that_would_come_too_late_warns(tmp_path):
    with pytest.warns(UserWarning, match="--watchdog_seconds 540 is not below --ddp_timeout 300"):
        parse(["--output_dir", str(tmp_path), "--ddp_timeout", "300"])
