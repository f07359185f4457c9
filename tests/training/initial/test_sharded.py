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
from training_runs import GPT2, HOPE, HOPE_HYBRID, LLAMA, ROOT
from transformers import AutoConfig, AutoModelForCausalLM

from hope_hf.step.arguments import Arguments
from hope_hf.training.engines.base import Engine
from hope_hf.training.initial import host_memory, values

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
    monkeypatch.setattr(host_memory, "free_memory", lambda device: free)
    monkeypatch.setattr("hope_hf.training.setup.build_model", None)
    status, _ = run("a", model=model)
    assert status == 2 and not (tmp_path / "a").exists()
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "1 process(es) on " in error and "are free; launch several with" in error


def everyone(monkeypatch, *rows) -> None:
    monkeypatch.setattr(host_memory, "gather_object", lambda own: list(rows))


def test_the_processes_of_each_machine_count(monkeypatch):
    engine = Engine()
    engine.fills_shards = True
    everyone(monkeypatch, ("a", 20), ("a", 20), ("b", 10))
    host_memory.check_host_memory(10, engine)
    everyone(monkeypatch, ("a", 20), ("a", 19), ("b", None))
    with pytest.raises(ValueError, match=r"2 process\(es\) on a build all of it: .*; give --init sharded\."):
        host_memory.check_host_memory(10, engine)


def test_weights_that_stay_in_their_file_need_no_memory(tmp_path):
    for dtype, size in ((torch.float32, 0), (torch.bfloat16, 4)):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **CONFIG), dtype=dtype)
        model.save_pretrained(tmp_path / str(dtype))
        args = Arguments(model_name_or_path=str(tmp_path / str(dtype)))
        assert host_memory.built_bytes(args, model.config, False) == size * model.num_parameters()
        assert host_memory.built_bytes(args, model.config, True) == 4 * model.num_parameters()


def test_weights_in_another_form_are_refused(tmp_path):
    """Mixtral's experts are separate in the files of the Hub."""
    config = AutoConfig.for_model("mixtral", **CONFIG | {"num_local_experts": 2, "num_key_value_heads": 2})
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "theirs")
    args = Arguments(model_name_or_path=str(tmp_path / "theirs"))
    model = values.build_on_meta(args, config)
    with pytest.raises(ValueError, match=r"in a form that --init sharded does not read: save the model again"):
        values.pretrained_values(args, config, model)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "ours", save_original_format=False)
    args = Arguments(model_name_or_path=str(tmp_path / "ours"))
    values.pretrained_values(args, config, values.build_on_meta(args, config))
