"""What lm-eval asks our model: ids whatever the tokenizer adds, and sums in float32."""

import pytest
import torch
from tokenizers.processors import TemplateProcessing

from hope_hf.evaluation.harness_model import harness_model
from hope_hf.evaluation.subject import Subject

BOS, EOS = "<bos>", "<eos>"
ADDED = {"none": "$A", "bos": f"{BOS} $A", "eos": f"$A {EOS}", "both": f"{BOS} $A {EOS}"}
TEXT, ANSWER = "w3 w1 w4 w1 w5 w9", " w2 w6"


@pytest.fixture
def asked(tiny_model, word_tokenizer):
    """Build lm-eval's model over a tokenizer that adds tokens as `added` says, and a function of log-probabilities."""

    def build(added: str, dtype=torch.float32):
        tokenizer = word_tokenizer
        tokenizer.add_special_tokens({"bos_token": BOS})
        marks = [(mark, tokenizer.convert_tokens_to_ids(mark)) for mark in (BOS, EOS)]
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=ADDED[added], special_tokens=marks)
        model = tiny_model(vocab_size=len(tokenizer))
        with torch.no_grad():
            model.lm_head.weight.mul_(20)
        subject = Subject(model.to(dtype), tokenizer)
        asked = harness_model(subject, tokenizer=tokenizer, batch_size=2, device="cpu", max_length=512)

        def score(context: list[str], scored: list[str]) -> float:
            ids = torch.tensor([tokenizer.convert_tokens_to_ids(context + scored)])
            with torch.no_grad():
                log_probs = model(ids).logits[0, :-1].double().log_softmax(-1)
            of_next = log_probs.gather(1, ids[0, 1:, None])
            return float(of_next[-len(scored) :].sum())

        return asked, score

    return build


def requests(kind: str, *arguments: tuple) -> list:
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, own, index) for index, own in enumerate(arguments)]


@pytest.mark.parametrize("added", ADDED)
def test_scores_are_of_the_text_alone_whatever_the_tokenizer_adds(asked, added):
    model, score = asked(added)
    begin = [BOS] if added in ("bos", "both") else []
    ((found, _),) = model.loglikelihood(requests("loglikelihood", (TEXT, ANSWER)), disable_tqdm=True)
    assert found == pytest.approx(score(begin + TEXT.split(), ANSWER.split()), rel=1e-5)
    (whole,) = model.loglikelihood_rolling(requests("loglikelihood_rolling", (TEXT,)), disable_tqdm=True)
    assert whole == pytest.approx(score([BOS], TEXT.split()), rel=1e-5)
    # What a prompt spells is text, and rolling leaves prompts as they were.
    assert model.tokenizer.bos_token_id not in model.tok_encode(f"w1 {BOS}")[len(begin) :]
    assert model.tok_encode("w1") == model.tokenizer.convert_tokens_to_ids([*begin, "w1"])


def test_scores_in_bfloat16_are_added_in_float32(asked):
    words = [f"w{index * 7 % 60}" for index in range(400)]
    model, score = asked("none", torch.bfloat16)
    (whole,) = model.loglikelihood_rolling(requests("loglikelihood_rolling", (" ".join(words),)), disable_tqdm=True)
    expected = score([BOS], words)
    # A sum of eight bits is off by up to one part in 512.
    assert whole == pytest.approx(expected, rel=1e-5)
    model.softmax_dtype = None
    (halves,) = model.loglikelihood_rolling(requests("loglikelihood_rolling", (" ".join(words),)), disable_tqdm=True)
    print(f"float32 {whole:.2f}, as lm-eval adds {halves:.2f}, exact {expected:.2f}")
    assert abs(halves - expected) > 10 * abs(whole - expected)
