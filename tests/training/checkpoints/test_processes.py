"""Two processes write one checkpoint."""

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from checkpoint_run import contents, names
from training_runs import ROOT

from hope_hf.training.checkpoints.manifest import verify
from hope_hf.training.checkpoints.tool import main

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("warm_python")]

TWO_PROCESSES = """
    import sys
    from pathlib import Path
    import torch
    from accelerate import PartialState
    from checkpoint_run import MARK, Run
    from hope_hf.training.checkpoints.reader import find_checkpoint

    process = PartialState(cpu=True)
    assert process.num_processes == 2
    run, rank, output_dir = Run(), process.process_index, sys.argv[1]
    torch.manual_seed(rank)
    run.step = 1
    run.save(output_dir, data={"rows": rank}, carried={"memory": torch.full((2,), float(rank))})
    expected = torch.rand(3)
    saved = run.restore(output_dir)
    assert saved.state["rank"]["data"] == {"rows": rank} and (saved.state["rank"]["carried"]["memory"] == rank).all()
    assert torch.equal(torch.rand(3), expected)

    run.step = 2
    try:
        run.save(output_dir, data={"bad": object()} if rank else {})
    except AssertionError:
        assert rank == 1
    except ValueError as error:
        assert rank == 0 and "checkpoint-1" in str(error), error
    else:
        raise SystemExit("a failure of one process did not reach the other")
    (find_checkpoint(output_dir, None).step == 1) or sys.exit("wrong choice")
    Path(f"{output_dir}.done-{rank}").touch()
"""


SHARDED = """
    import os, signal, sys, threading, time
    from pathlib import Path
    import torch
    from checkpoint_run import MARK, Run
    from safetensors.torch import load_file
    from hope_hf.training import finish
    from hope_hf.common.run_arguments import Arguments
    from hope_hf.training.checkpoints.writer import CheckpointWriter
    from hope_hf.training.engines.guard import lost_process
    from hope_hf.training.engines.choose import make_engine
    from hope_hf.training.checkpoints.weights import WeightShards

    output_dir = Path(sys.argv[1])
    run = Run(tie_word_embeddings=True)
    run.engine = make_engine(Arguments(), [])
    process = run.engine.accelerator
    assert run.engine.name == "FSDP2" and process.num_processes == 2
    run.engine.prepare(run.model, run.optimizer)

    may_begin, threads, together = threading.Event(), [], WeightShards.gather

    def bring_together(parts):
        threads.append(threading.current_thread())
        assert may_begin.wait(60)
        return together(parts)

    WeightShards.gather = bring_together
    may_begin.set()
    for name in ("background", "at_once", "parts"):
        (output_dir / name).mkdir(parents=True, exist_ok=True)
    background = CheckpointWriter(output_dir / "background", mark=MARK)
    # Leaves its memory, with other values, to the next one.
    run.save_with(background, background=True)
    background.finish()
    run.train(2)
    expected = {name: tensor.full_tensor() for name, tensor in run.model.state_dict().items()}
    at_once = run.save(output_dir / "at_once")
    assert threads.pop() is threading.main_thread()
    # Neither does one that saves parts.
    run.save_with(CheckpointWriter(output_dir / "parts", in_parts=True, mark=MARK))
    assert len(threads) == 1
    # A run that ends here does not gather them again.
    finish.take_shards = None
    weights = finish.final_weights(run.engine, at_once)
    assert bool(weights) == process.is_main_process
    if weights:
        run.engine.save_model(output_dir / "exported", weights)
    may_begin.clear()
    run.save_with(background, background=True)
    run.train(2)
    assert not background.written
    may_begin.set()
    background.finish()
    assert threading.main_thread() not in threads and len(threads) == 2
    saved = load_file(output_dir / "background" / "checkpoint-2" / "model.safetensors")
    assert expected.keys() - saved.keys() == {"lm_head.weight"}
    assert all(torch.equal(tensor, expected[name]) for name, tensor in saved.items())

    def vanish(parts):
        time.sleep(1)
        os.kill(os.getpid(), signal.SIGKILL)

    if not process.is_main_process:
        WeightShards.gather = vanish
    # The launcher tells the first process to end as soon as the other one has.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    run.save_with(background, background=True)
    try:
        background.finish()
    except RuntimeError as error:
        Path(f"{output_dir}.lost").write_text(lost_process(error))
    os._exit(0)
"""


def launched(script: str, folder: Path, *launcher: str, flags: tuple[str, ...] = ()) -> subprocess.CompletedProcess:
    """The script on two processes, with `folder/run` and the flags as its arguments."""
    file = folder / "script.py"
    file.write_text(textwrap.dedent(script))
    paths = os.pathsep.join([str(ROOT / "tests" / "training"), str(ROOT)])
    environment = os.environ | {"PYTHONPATH": paths, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", *launcher, str(file), str(folder / "run"), *flags]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)


def launched_fsdp2(script: str, folder: Path, *flags: str) -> subprocess.CompletedProcess:
    launcher = ["accelerate.commands.launch", "--num_processes", "2"]
    launcher += ["--config_file", str(ROOT / "accelerate_configs" / "fsdp2.yaml")]
    return launched(script, folder, *launcher, flags=flags)


def test_two_processes_keep_their_own_states_and_agree_on_failures(tmp_path):
    launcher = ["torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    result = launched(TWO_PROCESSES, tmp_path, *launcher)
    assert result.returncode == 0, result.stderr[-3000:]
    assert names(tmp_path) == ["run", "run.done-0", "run.done-1", "script.py"]
    assert names(tmp_path / "run") == ["checkpoint-1"]


def test_weights_come_together_while_the_training_goes_on(tmp_path):
    """The same bytes as if it waited, and as parts that are joined; and no waiting for a process that ends before."""
    result = launched_fsdp2(SHARDED, tmp_path)
    lost = tmp_path / "run.lost"
    assert lost.exists(), result.stderr[-5000:]
    assert re.search("Connection (closed|reset) by peer", lost.read_text())
    verify(tmp_path / "run" / "background" / "checkpoint-2")
    at_once = contents(verify(tmp_path / "run" / "at_once" / "checkpoint-2").folder)
    assert at_once == contents(tmp_path / "run" / "background" / "checkpoint-2")
    parts, joined = tmp_path / "run" / "parts" / "checkpoint-2", tmp_path / "joined"
    assert {"model-rank0.safetensors", "model-rank1.safetensors"} <= verify(parts).files.keys()
    assert main(["consolidate", str(parts), "--to", str(joined)]) == 0
    assert (joined / "model.safetensors").read_bytes() == at_once["model.safetensors"]
    exported = tmp_path / "run" / "exported" / "model.safetensors"
    assert exported.read_bytes() == at_once["model.safetensors"]
