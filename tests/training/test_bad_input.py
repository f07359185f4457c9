"""Mistakes of the user: one sentence that names the flag or file, an exit status, and nothing overwritten."""

import errno
import json
import shutil

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from training_runs import HOPE, HOPE_ATTENTION, HOPE_HYBRID, LLAMA, make_tokenizer

from hope_hf.common import process
from hope_hf.data import sources
from hope_hf.training import finish, main, setup, trainer
from hope_hf.training.checkpoints.writer import CheckpointWriter
from hope_hf.training.engines.base import Engine
from hope_hf.training.parsing import parse
from hope_hf.training.watch import process_files
from hope_hf.training.watch.monitor import Monitor


def refuse(run, capsys, sentence, name="a", **keywords):
    """Run with `keywords` and expect a refusal that contains `sentence`; returns the whole error."""
    status, _ = run(name, *keywords.pop("flags", []), **keywords)
    complaint = capsys.readouterr().err.strip().splitlines()[-1]
    assert status == 2
    assert complaint.startswith("error: ") and sentence in complaint
    return complaint


def hope(**fields) -> list[str]:
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "level_intermediate_sizes": [32], "level_periods": [256]}
    return ["--config_overrides", json.dumps(sizes | fields)]


@pytest.mark.parametrize(
    "model, sentence",
    [
        (hope(hiden_size=64), "HopeConfig has no field 'hiden_size'; did you mean hidden_size?"),
        (["--model_type", "llama", "--config_overrides", "num_layers=2"], "LlamaConfig has no field 'num_layers'"),
        (["--model_type", "lama"], "--model_type lama is unknown to transformers; did you mean llama?"),
        (["--config_name", "tinny"], "--config_name tinny is neither a folder nor a size of HOPE; did you mean tiny?"),
        (["--config_overrides", "hidden_size"], "--config_overrides 'hidden_size' cannot be read"),
        (["--config_overrides", "{'hidden_size': 1"], "cannot be read"),
        (hope(memory_chunk_size=0), "memory_chunk_size"),
        (hope(level_periods=[256, 512]), "level_"),
        (hope(hidden_size="wide"), "hidden_size"),
        (hope(vocab_size="large"), "vocab_size is 'large', give a whole number"),
        ([*LLAMA[:3], "num_attention_heads=0"], "--config_overrides: LlamaConfig is not valid"),
        (hope(level_variant="nested"), "nested"),
        (hope(vocab_size=100), "has ids up to 299"),
        ([*LLAMA, "--document_boundary", "carry"], "the llama has none: use --document_boundary reset"),
        ([*HOPE_ATTENTION, "--document_boundary", "carry"], "the attention mixer has none"),
        ([*HOPE_HYBRID, "--document_boundary", "carry"], "would keep the keys and values of all tokens"),
        ([*LLAMA, "--train_only", "memories"], "--train_only memories: this llama has no layer of memories"),
        ([*HOPE_ATTENTION, "--train_only", "memories"], "--train_only memories: this hope has no layer of memories"),
        (hope(num_hidden_layers=3, layer_types=["hope_memory"]), "`layer_types` has 1 entries"),
        (hope(memory_depth=2), "`memory_depth` is 2 and `memory_rule` is 'delta'"),
        ([*LLAMA[:3], LLAMA[3] + ",max_position_embeddings=16"], "--block_size 32 is longer than the model's 16 po"),
        ([*HOPE, "--level_optimizers", '{"7": {}}'], "--level_optimizers names level 7"),
        ([*HOPE, "--level_optimizers", "[" * 5000], "--level_optimizers is not JSON"),
        ([*HOPE, "--level_optimizers", '{"0": {"lr_factor": ' + "9" * 5000 + "}}"], "--level_optimizers is not JSON"),
        ([*HOPE, "--level_optimizers", '{"0": {"lr_factor": ' + "9" * 400 + "}}"], "give a number above 0, at most"),
        ([*HOPE, "--level_optimizers", '{"' + "9" * 5000 + '": {}}'], "give its number"),
        (["--config_overrides", "hidden_size=" + "[" * 5000], "cannot be read"),
        (["--config_overrides", "hidden_size=&a [*a]"], "cannot be read: write *a out"),
        (["--config_overrides", "hidden_size=64,hidden_size=32"], "cannot be read: a name comes twice"),
        (["--config_overrides", '{"hidden_size": 64, "hidden_size": 32}'], "cannot be read: a name comes twice"),
        (hope(memory_chunk_size=10**22), "memory_chunk_size has more than 64 bits"),
        (hope(pad_token_id=1000), "pad_token_id 1000 lies outside the vocabulary of 300 entries"),
        (hope(vocab_size=10**10), "vocab_size is 10000000000, give a whole number from 1 to 10,000,000."),
        ([*LLAMA, "--report_to", "wandbb"], "--report_to wandbb is not a tracker; did you mean wandb?"),
    ],
)
def test_wrong_flag_or_field(run, capsys, tmp_path, model, sentence):
    refuse(run, capsys, sentence, model=model)
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    "model, sentence",
    [
        (["--model_type", "lama"], "did you mean llama?"),
        (hope(hiden_size=64), "did you mean hidden_size?"),
        (hope(level_periods=[256, 512]), "level_"),
        ([*LLAMA[:3], "hidden_size=30,num_attention_heads=4"], "30"),
        ([*LLAMA, "--attn_implementation", "flesh"], "flesh"),
        ([*HOPE, "--level_optimizers", '{"7": {}}'], "--level_optimizers names level 7"),
        ([*LLAMA, "--document_boundary", "carry"], "the llama has none"),
        ([*LLAMA[:3], LLAMA[3] + ",max_position_embeddings=16"], "--block_size 32 is longer"),
    ],
)
def test_a_wrong_model_is_told_before_the_data_are_prepared(run, monkeypatch, capsys, model, sentence):
    monkeypatch.setattr(setup, "build_data", None)
    refuse(run, capsys, sentence, model=model)


@pytest.mark.parametrize(
    "flags, difference",
    [
        (["--seed", "7"], "seed was 42 and is now 7"),
        (["--model_type", "gpt2"], "model_type was 'llama' and is now 'gpt2'"),
    ],
)
def test_folder_of_another_run(run, capsys, tmp_path, flags, difference):
    run("a", "--max_train_steps", "2")
    before = {path: path.read_bytes() for path in (tmp_path / "a").rglob("*") if path.is_file()}
    refuse(run, capsys, difference, flags=["--max_train_steps", "2", *flags])
    assert before == {path: path.read_bytes() for path in (tmp_path / "a").rglob("*") if path.is_file()}


def test_folder_whose_run_had_other_data(run, capsys, tmp_path, corpus):
    file = tmp_path / "train.jsonl"
    shutil.copy(corpus[1], file)
    data = ["--train_file", str(file), *corpus[2:]]
    run("a", "--max_train_steps", "2", data=data)
    record = json.loads((tmp_path / "a" / "run.json").read_text())
    (tmp_path / "a" / "run.json").write_text(json.dumps(record | {"complete": False}))
    with file.open("a") as handle:
        handle.write('{"text": "one more document"}\n')
    refuse(run, capsys, "--train_file: train.jsonl had", flags=["--max_train_steps", "2"], data=data)


def test_folder_with_someone_elses_model(run, capsys, tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "config.json").write_text("{}")
    refuse(run, capsys, "holds config.json but no run.json")
    assert (tmp_path / "a" / "config.json").read_text() == "{}"


@pytest.mark.parametrize("record", ["[1]", "null", '{"identity": 5, "complete": false, "run_id": "a"}', "[" * 9999])
def test_a_run_json_that_is_no_runs(run, capsys, tmp_path, record):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "run.json").write_text(record)
    refuse(run, capsys, "run.json cannot be read: choose another --output_dir, or delete the folder.")
    assert (tmp_path / "a" / "run.json").read_text() == record


@pytest.mark.parametrize(
    "flags, sentence",
    [
        (["--logging_steps", "1"], "was deleted or is another run's now, and its checkpoints with it: begin again"),
        (["--logging_steps", "9", "--checkpointing_steps", "4"], "(the folder was deleted)"),
    ],
)
def test_the_folder_is_deleted_while_it_trains(run, capsys, tmp_path, monkeypatch, flags, sentence):
    begins = Monitor.step_begins

    def delete(monitor, step):
        if step == 3:
            shutil.rmtree(tmp_path / "a")
        return begins(monitor, step)

    monkeypatch.setattr(Monitor, "step_begins", delete)
    refuse(run, capsys, sentence, flags=flags)
    assert not (tmp_path / "a").exists()


def test_output_dir_is_a_file(run, capsys, tmp_path):
    (tmp_path / "a").write_text("mine")
    refuse(run, capsys, "is a file: name a folder")
    assert (tmp_path / "a").read_text() == "mine"


def test_truncated_checkpoint(run, capsys, tmp_path):
    run("a", "--checkpointing_steps", "4")
    checkpoint = tmp_path / "a" / "checkpoint-4"
    weights = checkpoint / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    refuse(run, capsys, "model.safetensors has", name="b", flags=["--resume_from_checkpoint", checkpoint])
    refuse(run, capsys, "is not a folder", name="b", flags=["--resume_from_checkpoint", tmp_path / "checkpoint-9"])
    assert not (tmp_path / "b").exists()


def test_a_checkpoint_that_cannot_be(run, capsys):
    for path in ("n" * 300, "missing"):
        refuse(
            run, capsys, f"--resume_from_checkpoint: {path} is not a folder", flags=["--resume_from_checkpoint", path]
        )


def test_checkpoint_of_another_model(run, capsys, tmp_path):
    run("a", "--checkpointing_steps", "4")
    flags = ["--resume_from_checkpoint", tmp_path / "a" / "checkpoint-4"]
    wider = [*LLAMA[:3], LLAMA[3].replace("intermediate_size=64", "intermediate_size=96")]
    refuse(run, capsys, "holds another run: config_overrides was", name="b", flags=flags, model=wider)
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize(
    "file, content, sentence",
    [
        ("config.json", '{"model_type": "llama", "hidden_size": "wide"}', "hidden_size"),
        ("config.json", '{"model_type": "hope", "memory_chunk_size": 0}', "memory_chunk_size"),
        ("config.json", '{"model_ty', "config.json"),
        ("model.safetensors", "cut off", "header"),
    ],
)
def test_damaged_model_to_start_from(run, capsys, tmp_path, file, content, sentence):
    run("a", "--max_train_steps", "1")
    (tmp_path / "a" / file).write_text(content)
    complaint = refuse(run, capsys, sentence, name="b", model=["--model_name_or_path", str(tmp_path / "a")])
    assert f"--model_name_or_path {tmp_path / 'a'} cannot be loaded" in complaint
    assert not (tmp_path / "b").exists()


def test_a_model_to_start_from_that_lacks_weights(run, capsys, tmp_path, corpus):
    run("a", "--max_train_steps", "1")
    weights, model = tmp_path / "a" / "model.safetensors", ["--model_name_or_path", str(tmp_path / "a")]
    assert weights.stat().st_mode == (tmp_path / "a" / "config.json").stat().st_mode
    tensors = load_file(weights)
    save_file({**tensors, "lm_head.weight": tensors["lm_head.weight"].int()}, weights, {"format": "pt"})
    refuse(run, capsys, "has a lm_head.weight of I32, which is no floating-point type", name="b", model=model)
    save_file({name: tensor for name, tensor in tensors.items() if "lm_head" not in name}, weights, {"format": "pt"})
    refuse(run, capsys, "has no weights for lm_head.weight, which its config.json asks for", name="b", model=model)
    torch.save(tensors, tmp_path / "a" / "pytorch_model.bin")
    weights.unlink()
    refuse(run, capsys, "has no model.safetensors, and only safetensors are read", name="b", model=model)
    (tmp_path / "a" / "tokenizer.json").write_text("[]")
    refuse(run, capsys, "holds no tokenizer that can be loaded", name="b", data=corpus[:4], model=model)
    assert not (tmp_path / "b").exists()


def test_missing_empty_and_single_document(run, capsys, tmp_path, corpus):
    empty, single = tmp_path / "empty.txt", tmp_path / "single.jsonl"
    empty.write_text("")
    single.write_text(json.dumps({"text": "alone" * 500}) + "\n")
    missing = tmp_path / "missing.txt"
    refuse(run, capsys, f"{missing} does not exist", data=["--train_file", str(missing), *corpus[4:]])
    refuse(run, capsys, "empty.txt", data=["--train_file", str(empty), *corpus[4:]])
    refuse(run, capsys, "single.jsonl", data=["--train_file", str(single), *corpus[4:]])


def test_token_ids_out_of_range(run, capsys, monkeypatch):
    # No tokenizer that fits gives such ids; a data set tokenized elsewhere may.
    monkeypatch.setattr(sources, "check_vocabulary", lambda tokenizer, vocab_size: None)
    model = [*LLAMA[:3], LLAMA[3] + ",vocab_size=60"]
    refuse(run, capsys, "outside the model's vocabulary of 60: tokenize it with the tokenizer of this", model=model)


@pytest.mark.parametrize("rank, heard", [("0", True), ("1", False)])
def test_what_all_processes_meet_is_said_once(monkeypatch, capsys, rank, heard):
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["--seed", "one"]) == 2
    assert ("error: " in capsys.readouterr().err) is heard


def test_data_that_only_one_process_cannot_read_are_named_by_it(run, capsys, monkeypatch):
    monkeypatch.setattr(process, "launched_rank", lambda: "1")
    monkeypatch.setattr(sources, "check_vocabulary", lambda tokenizer, vocab_size: None)
    refuse(run, capsys, "outside the model's vocabulary of 60", model=[*LLAMA[:3], LLAMA[3] + ",vocab_size=60"])


def test_block_longer_than_the_data(run, capsys, corpus):
    refuse(run, capsys, "--block_size", flags=["--block_size", "100000"], model=HOPE)


def test_tokenizer_larger_than_a_loaded_model(run, capsys, tmp_path, corpus):
    run("a", "--max_train_steps", "1")
    tokenizer = make_tokenizer(["abab cdcd"], vocab_size=270)
    tokenizer.add_tokens([f"<{number}>" for number in range(60)])
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    flags = ["--model_name_or_path", tmp_path / "a"]
    data = [*corpus[:4], "--tokenizer_name", str(tmp_path / "tokenizer")]
    refuse(run, capsys, "--tokenizer_name", name="b", flags=flags, data=data, model=[])


@pytest.mark.parametrize("error", [SafetensorError, Exception], ids=["safetensors", "tokenizers"])
def test_a_disk_that_the_final_model_fills(run, capsys, monkeypatch, error):
    def full(*_, **__):
        raise error("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(Engine, "save_model", full)
    # checkpoints are written by the same method
    monkeypatch.setattr(CheckpointWriter, "save", lambda writer, step, **_: writer._output_dir / f"checkpoint-{step}")
    monkeypatch.setattr(finish, "final_weights", lambda *_: {})
    assert run("a", "--max_train_steps", "1")[0] == 2
    assert "cannot be written (No space left on device): free space there" in capsys.readouterr().err


def test_a_disk_that_fills_up_between_checkpoints(run, capsys, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(process_files.Heartbeat, "beat", full)
    status, _ = run("a")
    assert status == 2
    complaint = capsys.readouterr().err
    assert "cannot be written (No space left on device): free space there" in complaint


def test_a_model_that_the_memory_does_not_hold(run, capsys):
    model = ["--config_overrides", "hidden_size=64,num_hidden_layers=1,memory_chunk_size=1000000000000"]
    complaint = refuse(
        run, capsys, "The memory does not hold the run: lower --per_device_train_batch_size", model=model
    )
    assert "can't allocate memory" in complaint


def test_an_error_of_memory_without_a_message(run, capsys, monkeypatch):
    def full(*_):
        raise MemoryError

    monkeypatch.setattr(trainer, "summed_loss", full)
    assert run("a")[0] == 2
    assert "shows what filled it (MemoryError)." in capsys.readouterr().err


@pytest.mark.parametrize("rate", ["--learning_rate", "--vector_learning_rate"])
def test_a_model_that_a_high_rate_has_ruined_is_no_complete_run(run, tmp_path, capsys, rate):
    status, _ = run("a", rate, "1e9", "--max_train_steps", "1", model=HOPE)
    assert status == 1 and json.loads((tmp_path / "a" / "run.json").read_text())["complete"] is False
    assert "not finite: lower --learning_rate (now" in capsys.readouterr().err


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
