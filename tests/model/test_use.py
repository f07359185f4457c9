"""What a language model of transformers is used with, from pipelines to export; and what is refused."""

import subprocess
import sys

import pytest
import torch
from mixers import HYBRID, MEMORIES, MIXED, random_ids
from torch.func import functional_call
from transformers import pipeline

from benchmarks.speed import prompt_apart
from hope_hf import HopeCache


def test_a_pipeline_writes_the_same_alone_and_in_a_batch(tiny_model, word_tokenizer):
    writer = pipeline("text-generation", tiny_model(**MIXED), tokenizer=word_tokenizer)
    prompts = ["w3 w4 w5", "w6", "w7 w8 w9 w10 w11 w12 w13"]
    options = dict(max_new_tokens=6, return_full_text=False, do_sample=False)
    alone = [writer(prompt, **options)[0]["generated_text"] for prompt in prompts]
    batch = [out[0]["generated_text"] for out in writer(prompts, batch_size=3, **options)]
    assert batch == alone and len(set(alone)) > 1


def test_a_pipeline_learns_from_its_prompt(tiny_model, word_tokenizer):
    learning = dict(periods=[8], rate=3.0, drift=20.0, gate=False, brake=0.0)
    levels = dict(level_periods=[1], level_intermediate_sizes=[40], layer_types=["full_attention"] * 2)
    model = tiny_model(level_learning=learning, **levels)
    writer, cache = pipeline("text-generation", model, tokenizer=word_tokenizer), HopeCache(model.config)
    prompt = " ".join(f"w{word}" for word in (3, 4, 5) * 8)
    options = dict(max_new_tokens=6, return_full_text=False, do_sample=False)
    learned = writer(prompt, learn=True, cache=cache, **options)[0]["generated_text"]
    assert cache.levels.steps.tolist() == [[3]]
    # given once, the flag holds for every call
    always = pipeline("text-generation", model, tokenizer=word_tokenizer, learn=True)
    assert always(prompt, **options)[0]["generated_text"] == learned != writer(prompt, **options)[0]["generated_text"]


def test_an_exported_forward_serves_every_mask(tiny_model):
    model = tiny_model(**HYBRID)
    ids, mask = random_ids(2, 19), torch.ones(2, 19, dtype=torch.long)
    left, right = mask.clone(), mask.clone()
    left[1, :4] = 0
    right[0, 15:] = 0
    graph = torch.export.export(model, (), {"input_ids": ids, "attention_mask": mask, "use_cache": False}).module()
    for real in (mask, left, right):
        inputs = {"input_ids": random_ids(2, 19, seed=2), "attention_mask": real, "use_cache": False}
        found, expected = graph(**inputs).logits, model(**inputs).logits
        torch.testing.assert_close(found[real.bool()], expected[real.bool()], rtol=0, atol=1e-6)


@pytest.mark.parametrize("options", [MEMORIES["paper-2"], MIXED], ids=["paper", "mixed"])
def test_torch_func_gives_the_gradients(tiny_model, options):
    model, ids = tiny_model(torch.float64, recompute_chunks=1, **options), random_ids(2, 19)
    inputs = {"input_ids": ids, "labels": ids, "use_cache": False, "skip_logits": True}
    model(**inputs).loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}

    def loss(parameters):
        return functional_call(model, parameters, (), inputs).loss

    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    torch.testing.assert_close(torch.func.grad(loss)(parameters), gradients, rtol=0, atol=1e-11)


# PEFT asks transformers for an attribute, and gives a cache, by the older name.
@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning")
def test_a_prefix_of_keys_is_refused(tiny_model):
    from peft import PrefixTuningConfig, get_peft_model

    prefix = get_peft_model(tiny_model(), PrefixTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"))
    with pytest.raises(ValueError, match="the cache is a"):
        prefix(input_ids=random_ids(1, 9))


@pytest.mark.processes
@pytest.mark.usefixtures("warm_python")
def test_a_long_prompt_takes_no_more_memory_than_a_short_one():
    """Three times the prompt, well above one piece; `benchmarks/speed.py prompt` has 100,000 tokens."""
    short, long = (prompt_apart(length, prefill_chunk_size=256)["mib"] for length in (512, 2048))
    assert long / short <= 1.1


IMPORT = """
import time
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedModel
import torch.utils.checkpoint, transformers.modeling_layers, transformers.generation
start = time.process_time()
from hope_hf import HopeModel
print(time.process_time() - start)
"""


@pytest.mark.long
@pytest.mark.processes
def test_importing_is_not_slow():
    run = subprocess.run([sys.executable, "-c", IMPORT], check=True, capture_output=True, text=True)
    assert float(run.stdout) <= 0.3
