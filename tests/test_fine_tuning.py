"""Tools for fine-tuning: Trainer, TRL's trainers, PEFT's LoRA, int8 weights."""

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    TorchAoConfig,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    pipeline,
)
from transformers.modelcard import TrainingSummary
from transformers.models.auto import modeling_auto
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer
from trl.chat_template_utils import has_generation_markers
from trl.trainer.utils import create_model_from_path

from hope_hf import HopeForCausalLM
from hope_hf.data.chat_template import PLAIN_TEMPLATE

pytestmark = [
    # Both still ask transformers 5.23 for attributes by their older names.
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Calling register_constant:FutureWarning"),
]
KINDS = ["hope_memory", "full_attention", "window_attention", "sparse_attention", "retaining_attention"]
STEPS = 8


def random_ids(*shape, seed=1):
    return torch.randint(62, shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def every_kind(tiny_model):
    """Build a model with a layer of every kind."""

    def build():
        windows = dict(sliding_window=6, attention_sinks=2, retained_block_size=4)
        return tiny_model(num_hidden_layers=5, layer_types=KINDS, **windows)

    return build


@pytest.fixture
def rows():
    return [{"input_ids": ids, "labels": ids} for ids in random_ids(64, 17)]


def arguments(folder, **options):
    defaults = dict(
        max_steps=STEPS, per_device_train_batch_size=4, learning_rate=1e-2, save_steps=4, eval_strategy="steps",
        eval_steps=4, report_to=[], use_cpu=True, seed=1, disable_tqdm=True,
    )  # fmt: skip
    return TrainingArguments(str(folder), **defaults | options)


class Interrupt(TrainerCallback):
    """Stops a run halfway, after a checkpoint."""

    def on_step_end(self, args, state, control, **kwargs):
        control.should_save = control.should_training_stop = state.global_step == STEPS // 2
        return control


def test_trainer_trains_evaluates_and_resumes_exactly(every_kind, rows, tmp_path):
    def trainer(folder, *callbacks):
        model = every_kind().train()
        return Trainer(model, arguments(folder), train_dataset=rows, eval_dataset=rows[:8], callbacks=list(callbacks))

    whole = trainer(tmp_path / "whole")
    before = whole.evaluate()["eval_loss"]
    whole.train()
    assert whole.evaluate()["eval_loss"] < before - 0.02
    trainer(tmp_path / "parts", Interrupt()).train()
    resumed = trainer(tmp_path / "parts")
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == STEPS
    for name, weight in whole.model.state_dict().items():
        assert torch.equal(weight, resumed.model.state_dict()[name]), name


def test_lora_trains_reloads_and_merges(every_kind, rows, tmp_path):
    base = every_kind()
    ids = random_ids(2, 19)
    plain = base(ids).logits
    model = get_peft_model(base, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    frozen = {name: p.clone() for name, p in model.named_parameters() if not p.requires_grad}
    Trainer(model, arguments(tmp_path / "run", eval_strategy="no"), train_dataset=rows).train()
    for name, weight in frozen.items():
        assert torch.equal(weight, model.get_parameter(name)), name
    model.eval()
    expected = model(input_ids=ids).logits
    assert (expected - plain).abs().max() > 1e-2
    model.save_pretrained(tmp_path / "adapter")
    adapted = PeftModel.from_pretrained(every_kind(), tmp_path / "adapter").eval()
    torch.testing.assert_close(adapted(input_ids=ids).logits, expected, rtol=0, atol=1e-6)
    merged = adapted.merge_and_unload()
    assert isinstance(merged, HopeForCausalLM)
    torch.testing.assert_close(merged(ids).logits, expected, rtol=0, atol=1e-5)


def test_sft_trainer_keeps_packed_texts_apart(every_kind, word_tokenizer, tmp_path):
    texts = [random_ids(1, length, seed=length) for length in (9, 13, 7, 20)]
    model = every_kind()
    with torch.no_grad():
        losses = [model(text, labels=text).loss * (text.numel() - 1) for text in texts]
    expected = float(sum(losses) / sum(text.numel() - 1 for text in texts))
    options = dict(learning_rate=0.0, max_steps=1, eval_strategy="no", save_strategy="no")
    options |= dict(bf16=False, max_length=64, packing=True)
    trainer = SFTTrainer(
        model,
        SFTConfig(**arguments(tmp_path).to_dict() | options),
        train_dataset=Dataset.from_list([{"input_ids": text[0].tolist()} for text in texts]),
        processing_class=word_tokenizer,
    )
    assert trainer.train().training_loss == pytest.approx(expected, abs=1e-5)


def test_dpo_learns_which_answer_is_better(tiny_model, word_tokenizer, tmp_path):
    pairs = [{"prompt": f"w{n} w{n + 1}", "chosen": " w5 w6 w7", "rejected": " w8 w9"} for n in range(20, 52)]
    options = dict(learning_rate=3e-3, bf16=False, logging_steps=1, eval_strategy="no", save_steps=100)
    trainer = DPOTrainer(
        tiny_model().train(),
        args=DPOConfig(**arguments(tmp_path).to_dict() | options),
        train_dataset=Dataset.from_list(pairs),
        processing_class=word_tokenizer,
        peft_config=LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    trainer.train()
    margins = [row["rewards/margins"] for row in trainer.state.log_history if "rewards/margins" in row]
    assert abs(margins[0]) < 1e-3 and margins[-1] > 0.05


def test_grpo_raises_the_reward(tiny_model, word_tokenizer, tmp_path):
    options = dict(learning_rate=1e-2, bf16=False, logging_steps=1, eval_strategy="no", save_steps=100, max_steps=12)
    options |= dict(num_generations=4, max_completion_length=12, temperature=1.0)
    trainer = GRPOTrainer(
        tiny_model().train(),
        # The tokens w5 and w50 to w59.
        reward_funcs=lambda completions, **_: [float(text.count("w5")) for text in completions],
        args=GRPOConfig(**arguments(tmp_path).to_dict() | options),
        train_dataset=Dataset.from_list([{"prompt": f"w{n}"} for n in range(20, 52)]),
        processing_class=word_tokenizer,
    )
    trainer.train()
    rewards = [row["reward"] for row in trainer.state.log_history if "reward" in row]
    assert sum(rewards[-3:]) > sum(rewards[:3]) + 1


def by_hand(model, ids: torch.Tensor) -> float:
    """Loss with a label smoothing of 0.1: a tenth is that of a token drawn at random."""
    with torch.no_grad():
        log = model(input_ids=ids).logits[:, :-1].log_softmax(-1)
    return float(-0.9 * log.gather(-1, ids[:, 1:, None]).mean() - 0.1 * log.mean())


def first_loss(model, folder, trainer=Trainer, kind=TrainingArguments, **options) -> float:
    """The loss of a trainer's first step with a label smoothing of 0.1."""
    options |= dict(max_steps=1, learning_rate=0.0, eval_strategy="no", save_strategy="no")
    settings = kind(**arguments(folder, label_smoothing_factor=0.1, **options).to_dict())
    rows = [{"input_ids": row, "labels": row} for row in random_ids(4, 17)]
    return trainer(model, settings, train_dataset=rows).train().training_loss


@pytest.mark.parametrize("kind", ["all kinds", "lora", "compiled"])
def test_label_smoothing_is_of_the_next_token(every_kind, tiny_model, tmp_path, kind):
    """`Trainer` shifts labels for the classes of its list alone: others learn the token that they have just read.

    `model.compile`, since transformers 5.23 does not find the class of what `torch_compile=True` wraps.
    """
    ids = random_ids(4, 17)
    if kind == "all kinds":
        model = every_kind()
        expected = by_hand(model, ids)
        loss = first_loss(model, tmp_path)
    elif kind == "lora":
        model = tiny_model()
        expected = by_hand(model, ids)
        lora = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
        loss = first_loss(lora, tmp_path, Seq2SeqTrainer, Seq2SeqTrainingArguments)
    else:
        model = tiny_model(num_hidden_layers=1, layer_types=["full_attention"])
        expected = by_hand(model, ids)
        model.compile(backend="eager")
        loss = first_loss(model, tmp_path)
    assert loss == pytest.approx(expected, abs=1e-5)


def test_lists_of_models_have_an_answer_for_hope(tiny_model, word_tokenizer, tmp_path, caplog):
    """Pipelines, model cards, and TRL, which loads a model by its class; lm-eval is in test_remote_code.py."""
    tiny_model().save_pretrained(tmp_path)
    # sharded by FSDP2, where torch puts FSDP before the name
    assert {"HopeForCausalLM", "FSDPHopeForCausalLM"} <= {*modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()}
    heads = {AutoModelForSequenceClassification: "text-classification", AutoModelForCausalLM: "text-generation"}
    heads |= {AutoModelForTokenClassification: "token-classification"}
    for auto, task in heads.items():
        head = auto.from_pretrained(tmp_path)
        assert pipeline(task, model=head, tokenizer=word_tokenizer)("w5 w6")
        trainer = Trainer(head, arguments(tmp_path, eval_strategy="no"))
        assert TrainingSummary.from_trainer(trainer).tasks == task
    assert "not supported" not in caplog.text
    assert type(create_model_from_path(str(tmp_path))) is HopeForCausalLM
    assert has_generation_markers(PLAIN_TEMPLATE)


def test_int8_weights_load_and_generate(tiny_model, tmp_path):
    # `make` installs it for the tests alone.
    from torchao.quantization import Int8WeightOnlyConfig

    model = tiny_model()
    model.save_pretrained(tmp_path)
    small = HopeForCausalLM.from_pretrained(tmp_path, quantization_config=TorchAoConfig(Int8WeightOnlyConfig()))
    mixer = small.model.layers[0].mixer
    assert type(mixer.q_proj.weight).__name__ == "Int8Tensor"
    assert type(mixer.initial_memory.weight).__name__ == "Parameter"
    ids = random_ids(2, 19)
    with torch.no_grad():
        expected = model(ids).logits
        error = (small(ids).logits - expected).abs().max() / expected.abs().max()
    assert 0 < error < 0.02
    assert small.generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=0).shape == (2, 22)
