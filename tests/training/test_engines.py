"""Every engine gives the curve of one process, for every model, and continues as if it had not stopped.

One launch per engine trains all models in turn; the runs on one process, which all engines share, are made once.
"""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from training_runs import GPT2, HOPE, HOPE_ATTENTION, LLAMA, curve

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
NEEDS_DEEPSPEED = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None or not (shutil.which("c++") or shutil.which("g++")),
    reason="DeepSpeed or the C++ compiler with which it builds itself is not installed",
)
PROCESSES = {"fsdp2": 2, "deepspeed_zero2": 2, "deepspeed_zero3": 2}
ENGINES = [pytest.param(name, marks=NEEDS_DEEPSPEED if name.startswith("deepspeed") else ()) for name in PROCESSES]
ROWS = 8
SMALL = ["--block_size", "32", "--logging_steps", "1", "--learning_rate", "5e-3", "--max_grad_norm", "0.5"]
SMALL += ["--cpu_threads", "1", "--save_total_limit", "9"]
# Model, optimizer steps, and the batches accumulated for one where there are several processes.
RUNS = {
    "hope": (HOPE, 20, 1),
    "hope-attention": (HOPE_ATTENTION, 8, 1),
    "llama": (LLAMA, 8, 4),
    "gpt2": (GPT2, 8, 1),
    "poisoned": (LLAMA, 8, 1),
}
POISONED_STEP = 3
SAVED_STEP = 14


def plan(corpus: list[str], processes: int) -> dict[str, dict]:
    """All runs of one launch, in their order."""
    runs = {}
    for name, (model, steps, accumulated) in RUNS.items():
        accumulated = 1 if processes == 1 else accumulated
        rows = ROWS // processes // accumulated
        batch = ["--per_device_train_batch_size", str(rows), "--gradient_accumulation_steps", str(accumulated)]
        length = ["--max_train_steps", str(steps), "--checkpointing_steps", str(SAVED_STEP)]
        runs[name] = {"flags": [*model, *corpus, *SMALL, *batch, *length]}
    runs["poisoned"]["poison"] = [POISONED_STEP, processes - 1]
    if processes > 1:
        runs["continued"] = {"flags": runs["hope"]["flags"], "forget": [RUNS["hope"][1]]}
    return runs


def launch(config: str, processes: int, runs: dict[str, dict], folder: Path) -> dict[str, list[dict]]:
    """The rows of every run."""
    folders = {name: folder / ("hope" if name == "continued" else name) for name in runs}
    entries = [{"folder": str(folders[name]), **run} for name, run in runs.items()]
    (folder / "plan.json").write_text(json.dumps(entries))
    paths = os.pathsep.join([str(ROOT), str(HERE)])
    environment = os.environ | {"PYTHONPATH": paths, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--config_file"]
    launcher += [str(ROOT / "accelerate_configs" / f"{config}.yaml"), "--num_processes", str(processes)]
    command = [*launcher, str(HERE / "engine_worker.py"), str(folder / "plan.json")]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400, check=False)
    assert result.returncode == 0, f"{result.stdout[-2000:]}\n{result.stderr[-6000:]}"
    return {name: json.loads(Path(f"{folders[name]}.{index}.json").read_text()) for index, name in enumerate(folders)}


@pytest.fixture(scope="module")
def one_process(tmp_path_factory, corpus):
    return launch("single", 1, plan(corpus, 1), tmp_path_factory.mktemp("single"))


@pytest.fixture(scope="module", params=ENGINES)
def engine(request, tmp_path_factory, corpus):
    processes = PROCESSES[request.param]
    return launch(request.param, processes, plan(corpus, processes), tmp_path_factory.mktemp(request.param))


def same(rows: list[dict], expected: list[dict], rel: float) -> None:
    assert curve(rows) == pytest.approx(curve(expected), rel=rel)
    assert curve(rows, "train/grad_norm") == pytest.approx(curve(expected, "train/grad_norm"), rel=10 * rel)
    assert curve(rows, "eval/loss") == pytest.approx(curve(expected, "eval/loss"), rel=rel)
    assert curve(rows, "eval/tokens") == curve(expected, "eval/tokens")
    assert curve(rows, "level/1/updates") == curve(expected, "level/1/updates")


@pytest.mark.parametrize("name", [name for name in RUNS if name != "poisoned"])
def test_engine_gives_the_curve_of_one_process(engine, one_process, name):
    assert len(curve(one_process[name])) == RUNS[name][1]
    same(engine[name], one_process[name], rel=1e-5)


def test_telemetry_of_memories_is_that_of_one_process(engine, one_process):
    names = {name for name in one_process["hope"][0] if name.startswith("memory/")}
    assert any(name.endswith("initial_state_grad_norm") for name in names)
    for name in names:
        assert curve(engine["hope"], name) == pytest.approx(curve(one_process["hope"], name), rel=1e-3), name


def test_continued_run_is_the_uninterrupted_one(engine):
    same(engine["continued"], engine["hope"], rel=1e-6)


def test_non_finite_step_of_one_process_is_skipped_by_all(engine, one_process):
    steps = RUNS["poisoned"][1]
    skipped = curve(engine["poisoned"], "train/skipped_steps")
    assert skipped == [float(step >= POISONED_STEP) for step in range(1, steps + 1)]
    losses, expected = ([x for x in curve(rows["poisoned"]) if x is not None] for rows in (engine, one_process))
    assert len(losses) == steps - 1
    assert losses == pytest.approx(expected, rel=1e-5)
