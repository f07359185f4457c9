"""What a machine without the package does with repositories of the Hub: `python remote_code.py alone REPOSITORY ...`.

Runs in a folder with the Hub's cache (`HF_HOME`). Each part is a fork of one clean process, and has a cache of code.
Results are files: NAME.safetensors of each repository, and `told.json`. With `installed` instead of `alone`, fla and
triton can be imported, and the models compute.
"""

import hashlib
import importlib.util
import json
import logging
import os
import shutil
import sys
import types
from importlib.machinery import ModuleSpec
from pathlib import Path

from forked import apart

if __name__ == "__main__":
    # these cannot be imported from here on
    sys.modules |= dict.fromkeys(["hope_hf"] if sys.argv[1] == "installed" else ["hope_hf", "fla", "triton"])

import torch  # noqa: E402
import transformers  # noqa: E402
from peft import AutoPeftModelForCausalLM, LoraConfig, get_peft_model  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from transformers import (  # noqa: E402
    AutoConfig,
    AutoModelForCausalLM,
    AutoProcessor,
    AutoTokenizer,
    PreTrainedConfig,
    Trainer,
    TrainingArguments,
    pipeline,
)

HEADS = ["", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering"]
GENERATE = dict(max_new_tokens=4, min_new_tokens=4, do_sample=False, pad_token_id=0)
LORA = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")


def upload(folder: Path, cache: Path, name: str) -> None:
    """Put the files of a folder where huggingface_hub keeps those of the repository owner/NAME."""
    repository, commit = cache / "hub" / f"models--owner--{name}", "c" * 40
    for part in ("blobs", "refs", f"snapshots/{commit}"):
        (repository / part).mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    for file in filter(Path.is_file, folder.iterdir()):
        content = hashlib.sha256(file.read_bytes()).hexdigest()
        shutil.copy(file, repository / "blobs" / content)
        (repository / "snapshots" / commit / file.name).symlink_to(f"../../blobs/{content}")


class Told(logging.Handler):
    """Collects what a library warns of."""

    def __init__(self, library: str):
        super().__init__(logging.WARNING)
        self.told = []
        logging.getLogger(library).addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.told.append(record.getMessage())


def load(place: str):
    """The model of a folder or repository."""
    model = AutoModelForCausalLM.from_pretrained(place, trust_remote_code=True)
    assert type(model).__module__.startswith("transformers_modules.")
    return model


def read_tokenizers(*repositories: str) -> None:
    """A tokenizer needs no code, so it loads without trust; so does a configuration as a mere list of fields."""
    for repository in repositories:
        for auto in (AutoTokenizer, AutoProcessor):
            assert auto.from_pretrained(repository)("w5 w7 w9")["input_ids"] == [5, 7, 9]
        # vLLM's reader: the fields first, then the class
        fields, _ = PreTrainedConfig.get_config_dict(repository)
        assert fields["model_type"] == "hope" and PreTrainedConfig.from_pretrained(repository).vocab_size == 64
    assert not [name for name in sys.modules if name.startswith("transformers_modules.")]
    for repository in repositories:
        config = AutoConfig.from_pretrained(repository, trust_remote_code=True)
        assert config.architectures == ["HopeForCausalLM"] and len(config.layer_types) == config.num_hidden_layers


def compute(*repositories: str) -> None:
    """Logits and generated tokens of every repository."""
    ids = load_file("ids.safetensors")["ids"]
    for repository in repositories:
        model = load(repository)
        with torch.no_grad():
            results = {"logits": model(ids).logits, "generated": model.generate(ids, **GENERATE)}
        save_file(results, f"{repository.split('/')[1]}.safetensors")


def recall(repository: str) -> None:
    """Passages of what was read, found with the standard library alone, and read before a prompt."""
    model, tokenizer = load(repository), AutoTokenizer.from_pretrained(repository)
    text = tokenizer("w5 w7 w9 w11 w13", return_tensors="pt").input_ids
    output = model(text, use_cache=True)
    cache = output.get("cache", output.get("past_key_values"))
    (passage,) = cache.recall("w9", tokenizer, tokens=1)
    assert passage.text == "w9" and passage.start == 2
    tokens = model.generate(text[:, :2], cache=cache, recall=True, tokenizer=tokenizer, **GENERATE)
    assert tokens.shape == (1, 6) and cache.get_seq_length() == 10


def compute_beside(package: str, repository: str) -> None:
    """The same where a package is installed that computes nothing here."""
    stub = types.ModuleType(package)
    stub.__spec__, stub.__path__, stub.__version__ = ModuleSpec(package, None), [], "9.9"
    sys.modules[package] = stub
    compute(repository)


def compute_beside_the_package(repository: str) -> None:
    """The same with the package, whose classes are taken whether or not the repository's code is trusted."""
    del sys.modules["hope_hf"]
    sys.path.insert(0, str(Path(__file__).parents[1]))
    importlib.import_module("hope_hf")
    ids, expected = (load_file(file) for file in ("ids.safetensors", f"{repository.split('/')[1]}.safetensors"))
    for trust in (None, True):
        model = AutoModelForCausalLM.from_pretrained(repository, trust_remote_code=trust)
        assert type(model).__module__ == "hope_hf.model.modeling_hope"
        # the package's fast paths round elsewhere
        torch.testing.assert_close(model(ids["ids"]).logits, expected["logits"], rtol=0, atol=1e-6)


def use(repository: str) -> None:
    """Heads, the pipeline, lm-eval and label smoothing."""
    from lm_eval.models.huggingface import HFLM

    # first of all, since a loaded model would fill transformers' lists
    told = Told("lm_eval"), Told("transformers")
    evaluated = HFLM(pretrained=repository, trust_remote_code=True, device="cpu", tokenizer=repository)
    generator = pipeline("text-generation", model=repository, trust_remote_code=True)
    text = generator("w5 w7", **GENERATE)[0]["generated_text"]
    assert text.startswith("w5 w7") and len(text) > len("w5 w7w0w0w0w0"), text
    for place in (repository, "local"):
        for head in HEADS:
            model = getattr(transformers, f"AutoModel{head}").from_pretrained(place, trust_remote_code=True)
            assert type(model).__name__ == ("HopeModel" if not head else f"Hope{head}")
    ids = load_file("ids.safetensors")["ids"]
    losses = {name: smoothed_loss(make(load(repository)), ids) for name, make in MODELS.items()}
    warned = [line for listener in told for line in listener.told]
    warned = [line for line in warned if "not supported for" in line or "model type is neither" in line]
    Path("told.json").write_text(json.dumps({"backend": evaluated.backend, "losses": losses, "warned": warned}))


MODELS = {"plain": lambda model: model, "lora": lambda model: get_peft_model(model, LORA)}


def arguments(folder: str, **options) -> TrainingArguments:
    """Options of one step on the CPU."""
    defaults = dict(max_steps=1, per_device_train_batch_size=2, report_to=[], use_cpu=True, disable_tqdm=True)
    return TrainingArguments(folder, **defaults | options)


def smoothed_loss(model, ids: torch.Tensor) -> float:
    """The loss of `Trainer` for the texts `ids` [2, T] with label smoothing."""
    rows = [{"input_ids": row, "labels": row} for row in ids]
    options = arguments("smoothed", label_smoothing_factor=0.1, learning_rate=0.0, save_strategy="no")
    trainer = Trainer(model, options, train_dataset=rows)
    return trainer.train().training_loss


def fine_tune(repository: str) -> None:
    """A run that is resumed, an adapter, and the merged model."""
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(1, 60, (8, 9))]
    Trainer(load(repository), arguments("tuned", save_steps=1), train_dataset=rows).train()
    resumed = Trainer(load("tuned/checkpoint-1"), arguments("tuned", max_steps=2, save_steps=1), train_dataset=rows)
    assert resumed.train(resume_from_checkpoint="tuned/checkpoint-1").global_step == 2
    get_peft_model(load(repository), LORA).save_pretrained("adapter")
    AutoPeftModelForCausalLM.from_pretrained("adapter", trust_remote_code=True).merge_and_unload().save_pretrained(
        "merged"
    )


def load_what_was_tuned() -> None:
    """The same on another machine: the repository and the cache of its code are gone."""
    shutil.rmtree(Path(os.environ["HF_HOME"], "hub"))
    for folder in ("tuned/checkpoint-2", "merged"):
        load(folder)


def environment(place: Path, **more: str) -> dict[str, str]:
    """That of a machine that has not been used: `place/cache` is the Hub's, and nothing is found in other folders."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "TRITON_INTERPRET")}
    return kept | {"HF_HOME": str(place / "cache"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"} | more


def with_own_code(part, *arguments: str) -> None:
    """Run a part in a fork with an empty cache of code."""
    code = f"{part.__name__}-{'-'.join(arguments)}".replace("/", "-")[:80]
    transformers.dynamic_module_utils.HF_MODULES_CACHE = os.path.abspath(code)
    apart(part, *arguments)


if __name__ == "__main__":
    repositories = sys.argv[2:]
    if sys.argv[1] == "installed":
        assert importlib.util.find_spec("fla") and importlib.util.find_spec("triton")
        compute(*repositories)
        sys.exit()
    with_own_code(read_tokenizers, *repositories)
    with_own_code(compute, *repositories)
    with_own_code(recall, repositories[0])
    for package in ("fla", "triton"):
        with_own_code(compute_beside, package, repositories[0])
    with_own_code(compute_beside_the_package, repositories[0])
    with_own_code(use, repositories[0])
    with_own_code(fine_tune, repositories[0])
    with_own_code(load_what_was_tuned)
