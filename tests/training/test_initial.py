"""`--init sharded`: two processes hold the same values as without it, in new and loaded models; else a sentence."""

import json
import os
import subprocess
import sys
import textwrap

import pytest
import torch
from checkpoint_run import CONFIG
from safetensors.torch import load_file, save_file
from torch import nn
from training_runs import GPT2, HOPE, HOPE_HYBRID, LLAMA, ROOT
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from hope_hf import HopeConfig
from hope_hf.common.run_arguments import Arguments
from hope_hf.training import initial
from hope_hf.training.engines.base import Engine
from hope_hf.training.initial import draw_by_block

# Every model of the plan twice, whole and sharded: what the process holds, its random numbers and a step are compared.
COMPARE = """
    import json, os, sys
    import torch
    from training_runs import reset_accelerate
    from hope_hf.optim import own_part
    from hope_hf.training.checkpoints.run_folder import RunFolder
    from hope_hf.training.engines.choose import make_engine
    from hope_hf.training.parsing import parse
    from hope_hf.training.process import prepare_process
    from hope_hf.training.trainer import begin, rehearse

    def held(engine):
        return {f"{part.names} from {part.start}": part.tensors["weight"].clone() for part in engine.weight_slices()}

    def begun(flags):
        reset_accelerate()
        args = parse(flags)
        engine = make_engine(args, [])
        prepare_process(args, engine.accelerator)
        training = begin(args, engine, RunFolder(args.output_dir, engine.accelerator, only_looks=True))
        training.run.optimizer.create_states()
        found = {
            "random": torch.get_rng_state(),
            **held(engine),
            **dict(training.run.model.named_buffers()),
            **{f"{index} of {len(group)}": own_part(parameter).clone()
               for group in (each["params"] for each in training.run.optimizer.param_groups)
               for index, parameter in enumerate(group)},
        }
        assert training.run.model.generation_config is not None
        loss, update = rehearse(args, engine, training)
        after = {f"{name} after a step": value for name, value in held(engine).items()}
        return found | after | {"loss": torch.tensor(loss), "norm": torch.tensor(update.grad_norm)}

    for name, flags in json.loads(sys.argv[1]).items():
        whole = begun(flags)
        own = begun([*flags, "--init", "sharded"])
        assert [*own] == [*whole], name
        for key, expected in whole.items():
            assert torch.equal(own[key], expected), f"{name}: {key}"
    torch.distributed.barrier()
    print(f"{len(json.loads(sys.argv[1]))} models are the same", flush=True)
    os._exit(0)
"""


@pytest.mark.processes
@pytest.mark.usefixtures("warm_python")
@pytest.mark.parametrize("engine", ["fsdp2", "fsdp1", "deepspeed_zero3"])
def test_shards_have_the_values_of_the_ordinary_way(tmp_path, corpus, run, engine):
    small = ["--dataset_name", "synthetic", *corpus[4:], "--block_size", "32", "--cpu_threads", "1"]
    small += ["--max_train_steps", "9"]
    plan = {
        "hybrid": HOPE_HYBRID,
        "llama, tied": [*LLAMA[:3], f"{LLAMA[3]},tie_word_embeddings=true"],
        "gpt2": GPT2,
    }
    # A model in bfloat16 whose files lack the head's prefix, as those of base models on the Hub.
    base = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("gpt2", vocab_size=300, n_embd=32, n_layer=2, n_head=2), dtype=torch.bfloat16
    )
    base.save_pretrained(tmp_path / "base")
    weights = load_file(tmp_path / "base" / "model.safetensors")
    stripped = {name.removeprefix("transformer."): tensor for name, tensor in weights.items()}
    save_file(stripped, tmp_path / "base" / "model.safetensors", metadata={"format": "pt"})
    plan["base"] = ["--model_name_or_path", str(tmp_path / "base")]
    assert run("hope", "--max_train_steps", "2", "--per_device_train_batch_size", "16", model=HOPE)[0] == 0
    plan["loaded"] = ["--model_name_or_path", str(tmp_path / "hope")]
    runs = {name: [*flags, *small, "--output_dir", str(tmp_path / "none")] for name, flags in plan.items()}
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(COMPARE))
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'tests' / 'training'}:{ROOT}", "OMP_NUM_THREADS": "1"}
    environment |= {"ACCELERATE_USE_CPU": "true"}
    file = ROOT / "accelerate_configs" / f"{engine}.yaml"
    command = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "2", "--config_file", str(file)]
    result = subprocess.run(
        [*command, str(script), json.dumps(runs)], env=environment, capture_output=True, text=True, timeout=240
    )
    assert result.stdout.count(f"{len(plan)} models are the same") == 2, result.stderr[-5000:]


def test_an_engine_that_cannot_names_the_launch_files_that_can(run, capsys, tmp_path):
    status, _ = run("a", "--init", "sharded")
    assert status == 2 and not (tmp_path / "a").exists()
    error = capsys.readouterr().err
    assert "--init sharded needs FSDP or ZeRO-3, and one process runs: launch with accelerate_configs/" in error


@pytest.mark.parametrize(("model", "free"), [(HOPE, 2**18), (LLAMA, 2**16)], ids=["hope", "llama"])
def test_a_model_beyond_the_memory_is_refused_before_it_is_built(run, capsys, tmp_path, monkeypatch, model, free):
    monkeypatch.setattr(initial, "free_memory", lambda device: free)
    monkeypatch.setattr("hope_hf.training.setup.build_model", None)
    status, _ = run("a", model=model)
    assert status == 2 and not (tmp_path / "a").exists()
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "1 process(es) on " in error and "are free; launch several with" in error


def everyone(monkeypatch, *rows) -> None:
    monkeypatch.setattr(initial, "gather_object", lambda own: list(rows))


def test_the_processes_of_each_machine_count(monkeypatch):
    engine = Engine()
    engine.fills_shards = True
    everyone(monkeypatch, ("a", 20), ("a", 20), ("b", 10))
    initial.check_host_memory(10, engine)
    everyone(monkeypatch, ("a", 20), ("a", 19), ("b", None))
    with pytest.raises(ValueError, match=r"2 process\(es\) on a build all of it: .*; give --init sharded\."):
        initial.check_host_memory(10, engine)


def test_weights_that_stay_in_their_file_need_no_memory(tmp_path):
    for dtype, size in ((torch.float32, 0), (torch.bfloat16, 4)):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **CONFIG), dtype=dtype)
        model.save_pretrained(tmp_path / str(dtype))
        args = Arguments(model_name_or_path=str(tmp_path / str(dtype)))
        assert initial.built_bytes(args, model.config, False) == size * model.num_parameters()
        assert initial.built_bytes(args, model.config, True) == 4 * model.num_parameters()


def test_weights_in_another_form_are_refused(tmp_path):
    """Mixtral's experts are separate in the files of the Hub."""
    config = AutoConfig.for_model("mixtral", **CONFIG | {"num_local_experts": 2, "num_key_value_heads": 2})
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "theirs")
    args = Arguments(model_name_or_path=str(tmp_path / "theirs"))
    model = initial.build_on_meta(args, config)
    with pytest.raises(ValueError, match=r"in a form that --init sharded does not read: save the model again"):
        initial.pretrained_values(args, config, model)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "ours", save_original_format=False)
    args = Arguments(model_name_or_path=str(tmp_path / "ours"))
    initial.pretrained_values(args, config, initial.build_on_meta(args, config))


SMALL_LLAMA = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2}
SMALL_HOPE = {"hidden_size": 32, "num_hidden_layers": 3, "head_dim": 16, "level_intermediate_sizes": [16, 16]}
SMALL_HOPE |= {"level_periods": [64, 128]}
CONFIGS = {
    "hope": lambda: HopeConfig(vocab_size=90, **SMALL_HOPE),
    "hope of the paper": lambda: HopeConfig(vocab_size=90, memory_rule="paper", **SMALL_HOPE),
    "hope-attention": lambda: HopeConfig(vocab_size=90, layer_types=["full_attention"] * 3, **SMALL_HOPE),
    "llama": lambda: LlamaConfig(vocab_size=90, **SMALL_LLAMA),
    "llama, tied": lambda: LlamaConfig(vocab_size=90, tie_word_embeddings=True, **SMALL_LLAMA),
    "gpt2": lambda: AutoConfig.for_model("gpt2", vocab_size=90, n_embd=32, n_layer=3, n_head=2, n_positions=16),
    "mamba2": lambda: AutoConfig.for_model(
        "mamba2", vocab_size=90, hidden_size=32, num_hidden_layers=3, num_heads=4, head_dim=16, state_size=8
    ),
    "mixtral": lambda: AutoConfig.for_model(
        "mixtral", vocab_size=90, num_key_value_heads=2, num_local_experts=2, **SMALL_LLAMA
    ),
}


def drawn(model_of, config) -> tuple[dict, PreTrainedModel]:
    """Values by name, and the model they were drawn for."""
    values = {}
    example = model_of(config)
    roots = {type(own): name for name, own in example.named_modules() if isinstance(own, PreTrainedModel)}
    torch.manual_seed(1)
    model = draw_by_block(lambda: model_of(config), lambda name, own: values.update({name: own.clone()}), roots)
    return values, model


@pytest.mark.parametrize("name", CONFIGS)
def test_values_and_random_numbers_are_those_of_the_ordinary_way(name):
    values, left = drawn(AutoModelForCausalLM.from_config, CONFIGS[name]())
    random = torch.get_rng_state()
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(CONFIGS[name]())
    assert torch.equal(torch.get_rng_state(), random)
    for parameter, expected in model.named_parameters():
        assert torch.equal(values[parameter], expected), parameter
    assert values.keys() - dict(model.named_parameters()).keys() == {*model.all_tied_weights_keys}
    assert all(parameter.is_meta for parameter in left.parameters())
    for (_, own), (buffer, expected) in zip(left.named_buffers(), model.named_buffers(), strict=True):
        assert torch.equal(own, expected), buffer


def test_queries_begin_as_keys():
    values, _ = drawn(AutoModelForCausalLM.from_config, CONFIGS["hope"]())
    (key_map, query_map), (keys, queries) = (
        [values[f"model.layers.1.mixer.{which}_{name}.weight"] for which in "kq"] for name in ("proj", "conv1d")
    )
    assert key_map.std() > 0 and torch.equal(key_map, query_map)
    assert keys.std() > 0 and torch.equal(keys[..., :-1], queries[..., 1:])


def test_a_block_is_freed_when_the_next_one_begins(monkeypatch):
    init_weights = PreTrainedModel._init_weights

    def watch(root, module):
        held.append(sum(parameter.numel() for parameter in root.parameters() if not parameter.is_meta))
        init_weights(root, module)

    held = []
    monkeypatch.setattr(PreTrainedModel, "_init_weights", watch)
    _, model = drawn(LlamaForCausalLM, CONFIGS["llama"]())
    # The ordinary model comes first.
    held = held[len(held) // 2 :]
    assert max(held) == sum(parameter.numel() for parameter in model.model.layers[0].parameters())


class Unset(LlamaForCausalLM):
    """Its head keeps the values of its construction."""

    def _init_weights(self, module):
        if module is not self.lm_head:
            super()._init_weights(module)


class Added(LlamaForCausalLM):
    """A block gets a parameter after its initialisation."""

    def __init__(self, config):
        super().__init__(config)
        self.model.layers[1].scale = nn.Parameter(torch.ones(3))


class Late(LlamaForCausalLM):
    """Changes its blocks after all others."""

    @torch.no_grad()
    def _init_weights(self, module):
        super()._init_weights(module)
        if module is self.lm_head:
            self.model.layers[0].mlp.up_proj.weight.zero_()


@pytest.mark.parametrize(
    ("model", "name"),
    [(Unset, "lm_head.weight"), (Added, "model.layers.1.scale"), (Late, "model.layers.0.mlp.up_proj.weight")],
)
def test_values_that_come_from_elsewhere_are_refused(model, name):
    before = PreTrainedModel._initialize_weights
    with pytest.raises(ValueError, match=f"--init sharded cannot draw {name}, .*: leave --init out"):
        drawn(model, CONFIGS["llama"]())
    assert PreTrainedModel._initialize_weights is before
    # Nothing is freed in later models.
    assert not any(parameter.is_meta for parameter in LlamaForCausalLM(CONFIGS["llama"]()).parameters())
