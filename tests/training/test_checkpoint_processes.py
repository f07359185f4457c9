"""Two processes write one checkpoint."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

from checkpoint_run import names

TWO_PROCESSES = """
    import sys
    from pathlib import Path
    import torch
    from accelerate import PartialState
    from checkpoint_run import Run
    from hope_hf.training.checkpoint import find_checkpoint

    process = PartialState(cpu=True)
    assert process.num_processes == 2
    run, rank, output_dir = Run(), process.process_index, sys.argv[1]
    torch.manual_seed(rank)
    run.step = 1
    run.save(output_dir, data_state={"rank": rank}, carried={"memory": torch.full((2,), float(rank))})
    expected = torch.rand(3)
    saved = run.restore(output_dir)
    assert saved.data_state == {"rank": rank} and (saved.carried["memory"] == rank).all()
    assert torch.equal(torch.rand(3), expected)

    run.step = 2
    try:
        run.save(output_dir, data_state={"bad": object()} if rank else {})
    except AssertionError:
        assert rank == 1
    except ValueError as error:
        assert rank == 0 and "checkpoint-1" in str(error), error
    else:
        raise SystemExit("a failure of one process did not reach the other")
    (find_checkpoint(output_dir, None).step == 1) or sys.exit("wrong choice")
    Path(f"{output_dir}.done-{rank}").touch()
"""


def test_two_processes_keep_their_own_states_and_agree_on_failures(tmp_path):
    script = tmp_path / "two.py"
    script.write_text(textwrap.dedent(TWO_PROCESSES))
    paths = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[2])])
    environment = os.environ | {"PYTHONPATH": paths, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(script)]
    result = subprocess.run(
        [*command, str(tmp_path / "run")], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert names(tmp_path) == ["run", "run.done-0", "run.done-1", "two.py"]
    assert names(tmp_path / "run") == ["checkpoint-1"]
