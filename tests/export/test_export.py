"""The exported folder: its content, its card, and that a failed export leaves nothing."""

import json
import os
import re
import shutil

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from hope_hf import HopeForCausalLM
from hope_hf.export import folder, main
from hope_hf.export.card import model_card, usage_code
from hope_hf.export.facts import read_training

TEXT_FILES = {".md", ".json", ".py"}


@pytest.fixture
def source(trained, tmp_path):
    """A copy of the run's folder, to be damaged."""
    return shutil.copytree(trained, tmp_path / "source")


@pytest.fixture
def refused(tmp_path, capsys):
    """`refused(folder, *flags)` exports to `tmp_path/out`, expects a refusal and no output; returns the error."""

    def attempt(source, *flags, status=2, out="out") -> str:
        before = sorted(tmp_path.rglob("*"))
        # Drop what the fixtures printed.
        capsys.readouterr()
        assert main([str(source), "--to", str(tmp_path / out), *map(str, flags)]) == status
        complaint = capsys.readouterr().err
        assert complaint.startswith("error: ") and complaint.count("\n") == 1, complaint
        assert sorted(tmp_path.rglob("*")) == before
        return complaint

    return attempt


def test_the_folder_holds_all_that_is_needed(trained, exported):
    code = {path.name for path in trained.glob("*.py")}
    assert "modeling_hope.py" in code
    tokenizer = {"tokenizer.json", "tokenizer_config.json"}
    model = {"config.json", "generation_config.json", "model.safetensors"}
    assert {path.name for path in exported.iterdir()} == code | tokenizer | model | {"README.md"}
    ours, theirs = (load_file(path / "model.safetensors") for path in (trained, exported))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert "AutoModelForCausalLM" in json.loads((exported / "config.json").read_text())["auto_map"]
    text = "the memory reads"
    assert AutoTokenizer.from_pretrained(exported)(text) == AutoTokenizer.from_pretrained(trained)(text)


def test_metadata_of_the_card(exported):
    data = ModelCard.load(exported / "README.md").data
    assert (data.library_name, data.pipeline_tag, data.license) == ("transformers", "text-generation", "mit")
    assert data.tags == ["hope", "nested-learning"]
    assert data.datasets is None and data.base_model is None
    assert data.model_name == "small-hope"
    found = {(result.dataset_name, result.metric_type): result.metric_value for result in data.eval_results}
    assert found == {
        ("held out.txt", "loss"): 5.5,
        ("held out.txt", "perplexity"): 244.7,
        ("held out.txt", "bits_per_byte"): 2.6,
        ("held out.txt", "accuracy"): 0.1,
        ("Passkey, 1,024 tokens, depth 0.5", "exact_match"): 0.75,
        ("held out of *.txt", "loss"): 5.25,
        ("held out of *.txt", "perplexity"): 190.5,
        ("held out of *.txt", "bits_per_byte"): 2.5,
    }


def test_the_page(trained, exported):
    page = (exported / "README.md").read_text()
    parameters = HopeForCausalLM.from_pretrained(trained).num_parameters()
    assert f"| parameters | {parameters:,} (float32) |" in page
    assert r"Text: \*.txt, 3,584 tokens in 7 steps, on 2 process(es)" in page
    assert f"python run_clm.py --train_file '*.txt' --output_dir={trained.name}" in page
    assert "loss 5.2500, perplexity 190.5000, bits per byte 2.5000" in page
    assert "**Text: held out.txt**" in page and "5.5000 ± 0.2500" in page
    assert "(and 10 rows more)" in page
    assert "2512.24695" in page and "vLLM" in page and "GGUF" in page


def test_no_folder_of_this_machine_is_shown(trained, exported):
    secret = [str(trained), str(trained.parent), "my books", str(exported)]
    texts = [path.read_text() for path in exported.iterdir() if path.suffix in TEXT_FILES]
    assert len(texts) > 10
    assert not [word for word in secret for text in texts if word in text]


def test_the_example_names_the_repository_and_nothing_else(exported):
    code = usage_code((exported / "README.md").read_text())
    assert re.findall(r'from_pretrained\("(.*?)"', code) == ["small-hope"] * 2
    compile(code, "example", "exec")


def test_a_limited_evaluation_gives_no_metrics(source, trained, write_results, monkeypatch, tmp_path):
    monkeypatch.setattr(folder, "check_export", lambda *arguments: "")
    shutil.copy(write_results(tmp_path / "report", limit=2), source / "results.json")
    (source / "all_results.json").unlink()
    assert main([str(source), "--to", str(tmp_path / "out")]) == 0
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert "**limited to 2 samples**" in card.text and "5.5000 ± 0.2500" in card.text
    assert card.data.eval_results is None


def test_names_on_the_hub_are_metadata(source, monkeypatch, tmp_path):
    monkeypatch.setattr(folder, "check_export", lambda *arguments: "")
    record = json.loads((source / "run.json").read_text())
    named = {"dataset_name": "someone/stories", "model_name_or_path": "someone/older", "train_file": None}
    record["identity"] |= named
    record["command"] = ["run_clm.py", "--dataset_name", "someone/stories", "--tokenizer_name", str(source)]
    (source / "run.json").write_text(json.dumps(record))
    assert main([str(source), "--to", str(tmp_path / "out")]) == 0
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert (card.data.datasets, card.data.base_model) == (["someone/stories"], "someone/older")
    assert "python run_clm.py --dataset_name someone/stories --tokenizer_name source\n" in card.text


def test_each_command_of_a_continued_run_has_its_line(source, tiny_model):
    record = json.loads((source / "run.json").read_text())
    record["commands"] = [["hope-hf", "train", "--seed", "1"], ["hope-hf", "train", "--max_train_steps", "9"]]
    (source / "run.json").write_text(json.dumps(record))
    card = model_card(tiny_model(), "owner/name", "mit", read_training(source), None)
    assert "```\nhope-hf train --seed 1\nhope-hf train --max_train_steps 9\n```\n" in card.text


def test_a_folder_with_nothing_but_a_model(source, monkeypatch, tmp_path):
    monkeypatch.setattr(folder, "check_export", lambda *arguments: "")
    for name in ("run.json", "metrics.jsonl", "all_results.json"):
        (source / name).unlink()
    (tmp_path / "out").mkdir()
    assert main([str(source), "--to", str(tmp_path / "out")]) == 0
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert "## Training" not in card.text and "## Evaluation" not in card.text
    assert card.data.license == "apache-2.0"


@pytest.mark.parametrize(
    "layer_types, has_memories, attention",
    [
        (["hope_memory", "hope_memory"], True, ""),
        (["hope_memory", "full_attention"], True, "softmax attention in 1 of the 2 layers"),
        (["full_attention", "full_attention"], False, "softmax attention (Hope-Attention)"),
        (["hope_memory", "sparse_attention"], True, "native sparse attention in 1 of the 2 layers"),
        (["sparse_attention", "sparse_attention"], False, "native sparse attention (Hope-Attention)"),
        (["window_attention", "window_attention"], False, "softmax attention with a window (Hope-Attention)"),
    ],
)
def test_the_card_says_what_mixes_tokens(tiny_model, layer_types, has_memories, attention):
    window = {"sliding_window": 8} if "window_attention" in layer_types else {}
    text = model_card(tiny_model(layer_types=layer_types, **window), "owner/name", "mit", None, None).text
    assert ("made of memories: small per-sequence networks, updated while the text is read" in text) is has_memories
    assert "make keys" not in text
    assert attention in text and ("softmax attention" in text) is ("softmax" in attention)


def test_an_export_of_other_weights_is_thrown_away(source, refused, monkeypatch):
    check = folder.check_export

    def check_changed(written, *arguments):
        weights = load_file(written / "model.safetensors")
        weights["model.norm.weight"] *= 1.0001
        save_file(weights, written / "model.safetensors", metadata={"format": "pt"})
        return check(written, *arguments)

    monkeypatch.setattr(folder, "check_export", check_changed)
    assert "The exported model's logits differ by" in refused(source, status=1)


def test_an_example_that_does_not_run_is_thrown_away(source, refused, monkeypatch):
    """The exported code needs the package, which another machine may lack."""
    check = folder.check_export

    def check_with_the_package(written, *arguments):
        module = written / "memory_scan.py"
        module.write_text(f"import hope_hf\n{module.read_text()}")
        return check(written, *arguments)

    monkeypatch.setattr(folder, "check_export", check_with_the_package)
    complaint = refused(source, status=1)
    sentence = "The example on the card does not run where hope_hf is not installed: "
    assert sentence in complaint and "hope_hf" in complaint.split(sentence)[1]


def test_a_folder_without_a_whole_hope(source, refused, tmp_path):
    assert f"{tmp_path / 'none'} is not a folder" in refused(tmp_path / "none")
    whole = HopeForCausalLM.from_pretrained(source)
    whole.model.save_pretrained(source)
    assert "has no weights for lm_head.weight" in refused(source)
    (source / "model.safetensors").unlink()
    assert f"{source} has no model.safetensors, and only safetensors" in refused(source)
    small = LlamaConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1, vocab_size=9)
    LlamaForCausalLM(small).save_pretrained(source)
    assert "holds a llama and no HOPE" in refused(source)


def test_weights_that_are_cut_off(source, refused):
    weights = source / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert f"{source} cannot be loaded: " in refused(source)


def test_weights_that_are_pickled(source, refused):
    torch.save(load_file(source / "model.safetensors"), source / "pytorch_model.bin")
    (source / "model.safetensors").unlink()
    assert f"{source} has no model.safetensors, and only safetensors" in refused(source)


def test_a_config_of_another_model(source, refused):
    """No weights are invented, left out or rounded."""
    config = json.loads((source / "config.json").read_text())
    more = {"num_hidden_layers": 3, "layer_types": ["hope_memory"] * 3}
    for fields, sentence in (
        ({"memory_rule": "paper"}, "has no weights for model.layers.0.mixer."),
        (more, "has no weights for model.layers.2."),
        ({"dtype": "int8"}, "its config.json has the dtype 'int8'"),
    ):
        (source / "config.json").write_text(json.dumps(config | fields))
        assert sentence in refused(source)
    (source / "config.json").write_text(json.dumps(config))
    more = load_file(source / "model.safetensors") | {"more.weight": torch.ones(1)}
    save_file(more, source / "model.safetensors", {"format": "pt"})
    assert "has weights for more.weight, which the model of its config.json lacks" in refused(source)


def test_the_weights_are_for_all_who_may_read_the_rest(exported):
    assert len({path.stat().st_mode for path in exported.iterdir() if path.is_file()}) == 1


def test_code_that_the_run_s_files_name_is_not_published(source, monkeypatch, tmp_path):
    """The check would run it."""
    monkeypatch.setattr(folder, "check_export", lambda *arguments: "")
    for name, key, reference in (
        ("tokenizer_config.json", "AutoTokenizer", [None, f"{source}--planted.Tokenizer"]),
        ("config.json", "AutoConfig", f"{source}--planted.Config"),
        ("config.json", "AutoModelForCausalLM", f"{source}--planted.Model"),
    ):
        content = json.loads((source / name).read_text())
        content["auto_map"] = {**content.get("auto_map", {}), key: reference}
        (source / name).write_text(json.dumps(content))
    assert main([str(source), "--to", str(tmp_path / "out")]) == 0
    assert not [path for path in (tmp_path / "out").iterdir() if "planted" in path.read_text(errors="replace")]


def test_a_tokenizer_that_needs_code_of_its_own(source, refused):
    file = source / "tokenizer_config.json"
    own = {"auto_map": {"AutoTokenizer": ["planted.Tokenizer", None]}, "tokenizer_class": "PlantedTokenizer"}
    file.write_text(json.dumps(json.loads(file.read_text()) | own))
    assert "needs code that tokenizer_config.json names, which an export does not run" in refused(source)


def test_no_tokenizer(source, refused):
    for file in source.glob("tokenizer*"):
        file.unlink()
    assert f"{source} holds no tokenizer that loads" in refused(source)


def test_an_output_folder_that_is_in_use(source, refused, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    assert f"--to {tmp_path / 'out'} exists and is not an empty folder" in refused(source)
    assert "is a file: name a folder" in refused(source, out="out/mine.txt")
    assert "is not an empty folder" in refused(source, out="source")
    assert "mine.txt" in refused(source, out="out/mine.txt/out")


@pytest.mark.parametrize(
    "text, sentence",
    [
        ("{", "cannot be read as JSON: name a results.json that hope-hf eval wrote"),
        ("[1]", "holds no JSON object"),
        ("{}", "has schema_version None, not 1"),
        ('{"schema_version": 1}', "is damaged: name a results.json"),
        (dict(results={"perplexity": {"tables": {"Text: a": [3]}}}), "is damaged"),
        (dict(results={"perplexity": {"tables": {"Text: a": []}}}), "is damaged"),
        (dict(results={"perplexity": {"tables": {"Text: a": [{"loss": 1.0}]}}}), "is damaged"),
        (dict(results={"memory": {"tables": {"Gates": [{"a": 1, "b": 2}, {"a": 1}]}}}), "is damaged"),
        (dict(results=[]), "is damaged"),
        (dict(model={"parameters": 7}), "holds results of a model of 7 parameters"),
        (dict(model=None), "holds results of several models"),
        (dict(unfinished=["passkey"]), "is of an evaluation that has not ended"),
    ],
)
def test_results_that_are_malformed(source, refused, write_results, tmp_path, text, sentence):
    path = write_results(tmp_path / "report")
    path.write_text(text if isinstance(text, str) else json.dumps(json.loads(path.read_text()) | text))
    complaint = refused(source, "--results", path)
    assert sentence in complaint and str(path) in complaint


@pytest.mark.parametrize(
    "file, text, sentence",
    [
        ("run.json", "{", "run.json cannot be read as JSON: take it out of the folder"),
        ("run.json", '{"identity": {}}', "run.json is not one that hope-hf train wrote"),
        ("metrics.jsonl", '{"step": 1}\n', "The last row of"),
        ("all_results.json", '{"eval_loss": "low"}', "holds a result that is not a number"),
        ("results.json", "{", "results.json cannot be read as JSON"),
        ("run.json", "[" * 10**5, "run.json cannot be read as JSON"),
        ("metrics.jsonl", "[" * 10**5, "The last row of"),
        ("metrics.jsonl", "[1]", "The last row of"),
    ],
)
def test_records_of_the_run_that_are_malformed_or_nested_too_deep(source, refused, file, text, sentence):
    (source / file).write_text(text)
    assert sentence in refused(source)


@pytest.mark.parametrize("file", ["run.json", "metrics.jsonl", "all_results.json"])
def test_records_of_the_run_that_are_named_pipes(source, file, tmp_path):
    (source / file).unlink()
    os.mkfifo(source / file)
    with pytest.raises(ValueError, match=f"{file} cannot be read"):
        read_training(source)


@pytest.mark.parametrize(
    "flags, sentence",
    [
        (["--push_to_hub", "a/b/c"], "--push_to_hub 'a/b/c' is not a name of a repository: write owner/name"),
        (["--push_to_hub", "owner/my model"], "--push_to_hub 'owner/my model' is not a name"),
        (["--push_to_hub", ""], "--push_to_hub is ''"),
        (["--private"], "--private needs an upload: add --push_to_hub"),
        (["--results", "none.json"], "--results none.json is not a file"),
        (["--licence", "mit"], "--licence"),
    ],
)
def test_wrong_flags(trained, refused, flags, sentence):
    assert sentence in refused(trained, *flags)


def test_a_failed_upload_leaves_the_export(trained, hub, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(folder, "check_export", lambda *arguments: "")
    hub.refuse["/create"] = 403
    out = tmp_path / "out"
    assert main([str(trained), "--to", str(out), "--push_to_hub", "owner/name"]) == 1
    complaint = capsys.readouterr().err
    assert complaint.count("\n") == 1
    assert f"(403), use one of its owner's with the right to write; {out} is complete, `hf upload" in complaint
    assert AutoModelForCausalLM.from_pretrained(out).config.model_type == "hope"
