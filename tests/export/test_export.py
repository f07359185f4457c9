"""The exported folder: its content, its card, and that a failed export leaves nothing."""

import json
import math
import shutil
import subprocess
from contextlib import nullcontext

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from hope_hf import HopeForCausalLM
from hope_hf.export import ExportFailed, main
from hope_hf.export.folder import check_export

KINDS = ["hope_memory", "full_attention", "window_attention", "sparse_attention", "retaining_attention"]


def test_the_folder_holds_all_that_is_needed(trained_run, exported):
    code = {path.name for path in trained_run.glob("*.py")}
    assert "modeling_hope.py" in code
    others = {"config.json", "generation_config.json", "model.safetensors", "README.md"}
    tokenizer = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    assert {path.name for path in exported.iterdir()} == code | others | tokenizer
    ours, theirs = load_file(trained_run / "model.safetensors"), load_file(exported / "model.safetensors")
    assert ours.keys() == theirs.keys()
    for name, weight in ours.items():
        assert torch.equal(weight, theirs[name]), name
    assert "AutoModelForCausalLM" in json.loads((exported / "config.json").read_text())["auto_map"]
    assert AutoTokenizer.from_pretrained(exported)("w5 w7")["input_ids"] == [5, 7]
    # for all who may read the rest
    assert len({path.stat().st_mode for path in exported.iterdir()}) == 1


def test_every_folder_holds_the_same_code(trained_run, exported, converted):
    """What works without the package from one of them works from all."""
    code = {path.name: path.read_bytes() for path in exported.glob("*.py")}
    classes = json.loads((exported / "config.json").read_text())["auto_map"]
    checkpoint = trained_run / "checkpoint-2"
    assert {path.parent for path in checkpoint.rglob("*.py")} == {checkpoint}
    for folder in (trained_run, checkpoint, converted):
        assert {path.name: path.read_bytes() for path in folder.glob("*.py")} == code
        assert json.loads((folder / "config.json").read_text())["auto_map"] == classes


def test_the_card_has_the_facts_of_run_and_evaluation(trained_run, card):
    found = card()
    data, page = found.data, found.text
    assert (data.library_name, data.pipeline_tag, data.license) == ("transformers", "text-generation", "mit")
    assert data.datasets is None and data.base_model is None
    losses = json.loads((trained_run / "all_results.json").read_text())
    values = {(result.dataset_name, result.metric_type): result.metric_value for result in data.eval_results}
    assert values == {
        ("held out.txt", "loss"): 5.5,
        ("held out.txt", "perplexity"): 244.7,
        ("held out.txt", "bits_per_byte"): 2.6,
        ("held out.txt", "accuracy"): 0.1,
        ("Passkey, 1,024 tokens, depth 0.5", "exact_match"): 0.75,
        ("held out of read.txt", "loss"): losses["eval_loss"],
        ("held out of read.txt", "perplexity"): losses["eval_perplexity"],
        ("held out of read.txt", "bits_per_byte"): losses["eval_bits_per_byte"],
    }
    parameters = HopeForCausalLM.from_pretrained(trained_run).num_parameters()
    assert f"| parameters | {parameters:,} (float32) |" in page
    assert "python run_clm.py --model_name_or_path start --train_file read.txt --block_size 16" in page
    assert "5.5000 ± 0.2500" in page


def test_no_folder_of_this_machine_is_shown(trained_run, exported, card, tmp_path):
    card()
    folders = [exported, tmp_path / "small-hope"]
    texts = [path.read_text() for folder in folders for path in folder.iterdir() if path.suffix != ".safetensors"]
    for secret in (str(trained_run), str(trained_run.parent), "my books", str(tmp_path)):
        assert not [text for text in texts if secret in text]


def test_names_on_the_hub_are_metadata(source, unchecked, tmp_path):
    record = json.loads((source / "run.json").read_text())
    names = {"dataset_name": "someone/stories", "model_name_or_path": "someone/older", "train_file": None}
    record["identity"] |= names
    # a run that was continued with changes
    commands = ["hope-hf train --dataset_name someone/stories", "hope-hf train --seed 1"]
    record["commands"] = [command.split() for command in commands]
    (source / "run.json").write_text(json.dumps(record))
    assert main([str(source), "--to", str(tmp_path / "out")]) == 0
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert (card.data.datasets, card.data.base_model) == (["someone/stories"], "someone/older")
    assert "```\n" + "\n".join(commands) + "\n```\n" in card.text


@pytest.mark.long
def test_an_export_that_does_not_run_elsewhere_fails_its_check(trained_run, exported, tmp_path):
    changed = shutil.copytree(exported, tmp_path / "changed")
    # code that needs the package, which another machine may lack
    module = changed / "memory_scan.py"
    module.write_text(f"import hope_hf\n{module.read_text()}")
    model = HopeForCausalLM.from_pretrained(trained_run).eval()
    with pytest.raises(ExportFailed, match="does not run where hope_hf is not installed: .*hope_hf"):
        check_export(changed, "small-hope", model)


@pytest.mark.parametrize("error", [0.0, 1e-3, math.nan])
def test_an_export_with_other_logits_fails_its_check(trained_run, exported, monkeypatch, error):
    model = HopeForCausalLM.from_pretrained(trained_run).eval()

    def other_process(command, cwd, **options):
        with torch.no_grad():
            logits = model(load_file(f"{cwd}/input.safetensors")["input_ids"]).logits
        logits[0, -1, 0] += error
        save_file({"logits": logits}, f"{cwd}/output.safetensors")
        return subprocess.CompletedProcess(command, 0, stdout="printed", stderr="")

    monkeypatch.setattr("hope_hf.export.folder.subprocess.run", other_process)
    expected = pytest.raises(ExportFailed, match="logits differ by") if error else nullcontext()
    with expected:
        assert check_export(exported, "small-hope", model) == "printed"


def test_the_logits_are_compared_as_the_copy_computes_them(trained_run, exported, monkeypatch):
    """Fast paths round otherwise, by more than is accepted where logits are small."""
    monkeypatch.setattr("hope_hf.export.folder.TOLERANCE", 0.0)
    assert check_export(exported, "small-hope", HopeForCausalLM.from_pretrained(trained_run).eval())


@pytest.fixture
def refused(source, tmp_path, capsys):
    """`refused(*flags)` exports `source`, expects a refusal and no output; returns the error."""

    def attempt(*flags, out="out", status=2) -> str:
        before = sorted(tmp_path.rglob("*"))
        # drop what the fixtures printed
        capsys.readouterr()
        assert main([str(source), "--to", str(tmp_path / out), *map(str, flags)]) == status
        complaint = capsys.readouterr().err
        assert complaint.startswith("error: ") and complaint.count("\n") == 1, complaint
        assert sorted(tmp_path.rglob("*")) == before
        return complaint

    return attempt


def test_an_export_that_fails_its_check_leaves_nothing(refused, monkeypatch):
    def fail(*arguments):
        raise ExportFailed("the check")

    monkeypatch.setattr("hope_hf.export.folder.check_export", fail)
    assert "the check" in refused(status=1)


# A file of the run, what it holds instead (None: it is missing), and words of the refusal.
DAMAGED = [
    ("run.json", "{", "run.json"),
    ("run.json", '{"identity": {}}', "run.json"),
    ("metrics.jsonl", '{"step": 1}\n', "metrics.jsonl"),
    ("metrics.jsonl", "[" * 10**5, "metrics.jsonl"),
    ("all_results.json", '{"eval_loss": "low"}', "all_results.json"),
    ("results.json", "{", "results.json"),
    ("model.safetensors", "cut", "cannot be loaded"),
    ("model.safetensors", None, "only safetensors"),
    ("tokenizer.json", None, "holds no tokenizer that loads"),
    ("tokenizer_config.json", '{"auto_map": {"AutoTokenizer": ["own.Own", null]}}', "code that tokenizer_config.json"),
    ("config.json", {"memory_rule": "paper"}, "has no weights for model.layers.0.mixer."),
    ("config.json", {"num_hidden_layers": 6, "layer_types": [*KINDS, "hope_memory"]}, "has no weights for"),
    ("config.json", {"dtype": "int8"}, "'int8'"),
    ("config.json", None, "holds no config.json"),
]


def test_a_run_with_a_damaged_file_is_refused(source, refused):
    for name, content, words in DAMAGED:
        file = source / name
        whole = file.read_bytes() if file.exists() else None
        if content is None:
            file.unlink()
        elif isinstance(content, dict):
            file.write_text(json.dumps(json.loads(whole) | content))
        else:
            file.write_text(content)
        complaint = refused()
        assert words in complaint and str(source) in complaint, (name, content, complaint)
        if whole is None:
            file.unlink()
        else:
            file.write_bytes(whole)


def test_code_that_the_run_s_files_name_is_not_published(source, unchecked, tmp_path):
    """The check would run it."""
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


def test_an_output_folder_that_is_in_use(refused, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    for out in ("out", "out/mine.txt", "source", "out/mine.txt/new"):
        assert f"--to {tmp_path / out}" in refused(out=out)


# Text of a results.json, or fields of one that are otherwise, and words of the refusal.
RESULTS = [
    ("{", "cannot be read"),
    ("[1]", "no JSON object"),
    ('{"schema_version": 1}', "damaged"),
    ({"results": {"perplexity": {"tables": {"Text: a": [3]}}}}, "damaged"),
    ({"results": {"perplexity": {"tables": {"Text: a": [{"loss": 1.0}]}}}}, "damaged"),
    ({"results": {"memory": {"tables": {"Gates": [{"a": 1, "b": 2}, {"a": 1}]}}}}, "damaged"),
    ({"model": {"parameters": 7}}, "of a model of 7 parameters"),
    ({"model": None}, "of several models"),
    ({"unfinished": ["passkey"]}, "not ended"),
]


def test_results_that_are_malformed_or_of_another_model(refused, write_results, tmp_path):
    path = write_results(tmp_path / "report")
    whole = json.loads(path.read_text())
    for content, words in RESULTS:
        path.write_text(content if isinstance(content, str) else json.dumps(whole | content))
        complaint = refused("--results", path)
        assert words in complaint and str(path) in complaint, (content, complaint)


def test_a_failed_upload_leaves_the_export(source, hub, unchecked, tmp_path, capsys):
    hub.refuse["/create"] = 403
    out = tmp_path / "out"
    assert main([str(source), "--to", str(out), "--push_to_hub", "owner/name"]) == 1
    complaint = capsys.readouterr().err
    assert complaint.count("\n") == 1 and "(403)" in complaint and f"{out} is complete, `hf upload" in complaint
    assert (out / "model.safetensors").exists()
