"""Run PEFT's tests of decoder models on HOPE, Hope-Attention and Mamba-2, and compare: `make peft-suite`.

PEFT_SUITE names a folder with `tests/` of the installed release of PEFT (CONTRIBUTING.md says where it comes from).
Further arguments go to pytest. Exit status 1 if a test fails that Mamba-2 passes, except prefix tuning of HOPE.
"""

import json
import sys
import tempfile
from pathlib import Path

import peft
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import Mamba2Config, Mamba2ForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from hope_hf import HopeConfig, HopeForCausalLM  # noqa: E402
from tests.hf_suite.run import print_outcomes, read_report, run_pytest, suite_folder  # noqa: E402

# Names of models and data on the Hub that single tests load: all are replaced by our tiny ones.
HUB_MODELS = [
    "peft-internal-testing/tiny-random-OPTForCausalLM",
    "peft-internal-testing/tiny-dummy-qwen2",
    "peft-internal-testing/tiny-random-gemma4-E2B",
    "trl-internal-testing/tiny-random-LlamaForCausalLM",
    "trl-internal-testing/tiny-Qwen3ForCausalLM",
    "hf-internal-testing/tiny-random-Gemma3ForCausalLM",
    "hf-internal-testing/tiny-random-MistralForCausalLM",
]
PEER = "Mamba-2"
QUOTES = "ybelkada/english_quotes_copy"
WORDS = 96
# A prefix is keys and values in front of the text: HOPE refuses it, Mamba-2 ignores it. Its tests have such names.
PREFIX_TUNING = ("PrefixTuning", "prefix_tuning")


def tiny_models() -> dict[str, PreTrainedModel]:
    """Ours and their peer, with the same width and depth, and with the peer's usual spread of initial weights."""
    torch.manual_seed(0)
    shared = dict(
        vocab_size=WORDS + 2, hidden_size=32, num_hidden_layers=2, head_dim=8, initializer_range=0.1,
        eos_token_id=WORDS, pad_token_id=WORDS + 1,
    )  # fmt: skip
    ours = dict(**shared, level_intermediate_sizes=[32] * 3, memory_chunk_size=4)
    mamba2 = Mamba2Config(**shared, num_heads=8, expand=2, n_groups=1, state_size=8, chunk_size=8)
    return {
        "HOPE": HopeForCausalLM(HopeConfig(**ours)),
        "Hope-Attention": HopeForCausalLM(HopeConfig(**ours, layer_types=["full_attention"] * 2)),
        PEER: Mamba2ForCausalLM(mamba2),
    }


def main(arguments: list[str]) -> int:
    """Run and compare; returns the exit status."""
    suite = suite_folder("PEFT_SUITE", "test_decoder_models.py")
    if suite is None:
        return 2
    outcomes = {}
    for name, model in tiny_models().items():
        print(f"\n{name}", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            write_workplace(Path(folder), model)
            outcomes[name] = run_suite(suite, Path(folder), arguments)
    print_outcomes(f"PEFT {peft.__version__}", outcomes)
    theirs = outcomes.pop(PEER)
    faults = [fault for name, results in outcomes.items() for fault in compare(name, results, theirs)]
    print("\n".join(["", *faults]) if faults else f"\nNo test fails that {PEER} passes, of HOPE prefix tuning apart.")
    return 1 if faults else 0


def write_workplace(folder: Path, model: PreTrainedModel) -> None:
    """The model as `tiny` and under the names on the Hub, and a text of a few lines under the name of the quotes."""
    vocabulary = {f"w{index}": index for index in range(WORDS)} | {"<eos>": WORDS, "<pad>": WORDS + 1}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", pad_token="<pad>")
    model.save_pretrained(folder / "tiny")
    tokenizer.save_pretrained(folder / "tiny")
    for name in HUB_MODELS:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).symlink_to(folder / "tiny")
    (folder / QUOTES).mkdir(parents=True)
    quotes = [{"quote": " ".join(f"w{row * column % WORDS}" for column in range(1, 16 + row))} for row in range(1, 33)]
    (folder / QUOTES / "train.jsonl").write_text("\n".join(map(json.dumps, quotes)))


def run_suite(suite: Path, folder: Path, arguments: list[str]) -> dict[str, str]:
    """PEFT's tests of decoder models in `folder`, which has the model. Returns {test: passed, skipped or failed}."""
    report = folder / "report.xml"
    run_pytest(suite, [ROOT / "tests/peft_suite/common.py"], report, folder, arguments)
    return read_report(report).get("TestDecoderModels", {})


def compare(name: str, ours: dict[str, str], theirs: dict[str, str]) -> list[str]:
    """Tests that the peer passes and one of our models does not, one sentence each."""
    if not ours or not theirs:
        return [f"{name} or {PEER} ran no test."]
    missing = [test for test, outcome in theirs.items() if outcome == "passed" and ours[test] != "passed"]
    if name == "HOPE":
        missing = [test for test in missing if not any(word in test for word in PREFIX_TUNING)]
    return [f"{name}: {test} is {ours[test]}, and {PEER} passes it." for test in missing]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
