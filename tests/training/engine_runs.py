"""Runs of the trainer under an engine: in this process, or by `accelerate launch` as README has it."""

import importlib.util
import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import engine_worker
import pytest
import torch
import warm_python
import yaml
from training_process import training_process
from training_runs import GPT2, HOPE, HOPE_HYBRID, HOPE_SPARSE, LLAMA, ROOT, curve, free_port

HERE = Path(__file__).parent
NEEDS_DEEPSPEED = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed"
)

ROWS = 8
SMALL = ["--block_size", "32", "--logging_steps", "1", "--learning_rate", "5e-3", "--max_grad_norm", "0.5"]
SMALL += ["--vector_learning_rate", "1e-2", "--cpu_threads", "1", "--save_total_limit", "9"]
FP16 = ["fp16", "fp16 continued"]
# Processes, and what is run on them. Each fact is held by the engines that have code of their own for it.
ENGINES = {
    "ddp": (2, ["hope", "poisoned", "moved", "shards"]),
    "fsdp2": (
        2,
        [
            "dry", "hope", "hope-sparse", "llama", "reduced", "gpt2", "muon", "poisoned", *FP16, "continued", "moved",
            "drawn", "loaded",
        ],
    ),
    "fsdp1": (2, ["dry", "hope", "llama", "reduced", "gpt2", "fp16", "moved", "drawn", "loaded"]),
    "fsdp_hybrid": (4, ["hope", "llama", "moved"]),
    "fsdp_offload": (2, ["llama"]),
    "multi_node_fsdp": (2, ["llama"]),
    "deepspeed_zero2": (2, ["hope", "llama", *FP16, "moved"]),
    "deepspeed_zero3": (
        2, ["hope", "hope-sparse", "gpt2", "poisoned", "fp16", "continued", "moved", "drawn", "loaded"]
    ),
    "deepspeed_zero3_offload": (2, ["dry", "llama"]),
    "single_bf16": (1, ["llama"]),
}  # fmt: skip
# Model, optimizer steps, and the accumulated batches per step with several processes.
RUNS = {
    "dry": ([*LLAMA, "--dry_run"], 4, 1),
    "hope": (HOPE, 5, 1),
    "hope-sparse": (HOPE_SPARSE, 4, 2),
    "llama": (LLAMA, 4, 4),
    "gpt2": (GPT2, 4, 1),
    "muon": ([*HOPE, "--optimizer", "muon", "--adam_epsilon", "1e-3"], 4, 1),
    "poisoned": (LLAMA, 4, 1),
    "fp16": (HOPE, 5, 1),
    "shards": (LLAMA, 4, 1),
    "drawn": (HOPE_HYBRID, 2, 1),
    "loaded": ([], 2, 1),
}
# Here the run "hope" saves its weights in parts, from which "moved" of other launches and one process continue.
IN_PARTS = {"fsdp1", "fsdp_hybrid", "deepspeed_zero3"}
# Runs in which no process ever holds the whole model; "moved" continues (from parts under the hybrid).
SHARDED_FROM_THE_START = {
    "fsdp2": ["moved", "drawn", "loaded"],
    "fsdp1": ["drawn", "loaded"],
    "fsdp_hybrid": ["moved"],
    "deepspeed_zero3": ["drawn", "loaded"],
}
# The engine whose checkpoint the run "moved" continues: one process, or two processes for four.
SOURCES = {"fsdp_hybrid": "fsdp2"}
POISONED_STEP = 2
LATER_POISONED_STEP = 4
# Within a period of the second level, whose clock is saved too.
SAVED_STEP = 3


def deepspeed_has_fp16() -> bool:
    """DeepSpeed's own check before it trains in fp16 on a CPU."""
    try:
        return torch.ops.mkldnn._is_mkldnn_fp16_supported()
    except (AttributeError, RuntimeError):
        return False


def plan(
    data: list[str],
    processes: int,
    wanted: list[str],
    source: Path | None = None,
    engine: str | None = None,
    texts: dict[str, list[str]] | None = None,
) -> dict[str, dict]:
    """The wanted runs for one launch, in their order.

    `source` holds the runs of another launch; `texts` are the flags of runs that do not read `data`.
    """
    runs = {}
    for name, (model, steps, accumulated) in RUNS.items():
        accumulated = min(accumulated, ROWS // processes) if processes > 1 else 1
        rows = ROWS // processes // accumulated
        batch = ["--per_device_train_batch_size", str(rows), "--gradient_accumulation_steps", str(accumulated)]
        length = ["--max_train_steps", str(steps), "--checkpointing_steps", str(SAVED_STEP)]
        text = (texts or {}).get(name, data)
        runs[name] = {"flags": [*model, *text, *SMALL, *batch, *length]}
    if engine in IN_PARTS:
        runs["hope"]["flags"].append("--save_sharded")
    last = processes - 1
    hope, fp16, llama = (runs[name]["flags"] for name in ("hope", "fp16", "llama"))
    runs["poisoned"]["poison"] = [POISONED_STEP, last]
    runs["fp16"] |= {"overflow": [POISONED_STEP, last], "poison": [LATER_POISONED_STEP, last]}
    # The same step is poisoned again, and none overflows.
    again = [LATER_POISONED_STEP - SAVED_STEP, last]
    runs["fp16 continued"] = {"flags": fp16, "forget": [RUNS["fp16"][1]], "overflow": [99, 0], "poison": again}
    runs["reduced"] = {"flags": [*llama, "--sync_each_batch"]}
    # Two ways to continue after the first checkpoint: with its own, and with another launch's.
    # The latter recomputes its mixers, which changes no number.
    forgotten = [RUNS["hope"][1]]
    recomputing = [*hope, "--gradient_checkpointing", "mixer"]
    runs["continued"] = {"flags": hope, "forget": forgotten}
    runs["moved"] = {"flags": recomputing, "forget": forgotten, "source": f"{source}/hope"}
    for name in SHARDED_FROM_THE_START.get(engine, ()):
        runs[name]["flags"] = [*runs[name]["flags"], "--init", "sharded"]
    return {name: run for name, run in runs.items() if name in wanted}


@dataclass(frozen=True)
class Launched:
    """What a launch has left."""

    folder: Path
    rows: dict[str, list[dict]]

    def output(self, name: str) -> str:
        """What the run printed."""
        whole = (self.folder / "machine_0.txt").read_text()
        return whole.partition(f"=== {name}\n")[2].partition("\n=== ")[0]

    def files(self, name: str, pattern: str) -> list[Path]:
        """The files of its processes, of the first rank first."""
        return sorted((self.folder / name / "processes").glob(pattern))


class Launches:
    """Launches by engine, each made at its first use; "single" is all runs in this process."""

    def __init__(self, factory: pytest.TempPathFactory, corpus: list[str], texts: dict[str, list[str]]):
        self.factory, self.corpus, self.texts = factory, corpus, texts
        self.made = {}

    def __call__(self, engine: str) -> Launched:
        if engine not in self.made:
            # A failed launch fails every test of its engine, and is not repeated.
            self.made[engine] = None
            self.made[engine] = self._launch(engine)
        assert self.made[engine] is not None, f"the launch of {engine} has failed"
        return self.made[engine]

    def _launch(self, engine: str) -> Launched:
        everything = [name for name in RUNS if name != "dry"]
        processes, wanted = ENGINES.get(engine, (1, everything))
        if engine.startswith("deepspeed") and not deepspeed_has_fp16():
            wanted = [run for run in wanted if run not in FP16]
        source = self(SOURCES.get(engine, "single")).folder if "moved" in wanted else None
        folder = self.factory.mktemp(engine)
        runs = plan(self.corpus, processes, wanted, source, engine, self.texts)
        return Launched(folder, run_plan(engine, processes, runs, folder))


# A run that continues another one has its folder.
CONTINUED = {"continued": "hope", "fp16 continued": "fp16"}


def run_plan(
    engine: str, processes: int, runs: dict[str, dict], folder: Path, on_cpu: bool = True
) -> dict[str, list[dict]]:
    """The rows of every run: "single" on the CPU in this process, else by `accelerate launch`."""
    entries = [{"folder": str(folder / CONTINUED.get(name, name)), **run} for name, run in runs.items()]
    if engine == "single" and on_cpu:
        with training_process():
            engine_worker.run_all(entries)
    else:
        launch(engine, processes, entries, folder, on_cpu)
    rows = {}
    for index, (name, entry) in enumerate(zip(runs, entries, strict=True)):
        rows[name] = json.loads(Path(f"{entry['folder']}.{index}.json").read_text())
    return rows


def launch(config: str, processes: int, entries: list[dict], folder: Path, on_cpu: bool = True) -> None:
    """`accelerate launch` as README has it; on as many machines as the file says."""
    file = ROOT / "accelerate_configs" / f"{config}.yaml"
    machines = yaml.safe_load(file.read_text())["num_machines"]
    plan_file = folder / "plan.json"
    plan_file.write_text(json.dumps(entries))
    command = [warm_python.executable(), "-m", "accelerate.commands.launch", "--config_file", str(file)]
    command += ["--num_processes", str(processes)]
    if machines > 1:
        command += ["--main_process_port", str(free_port())]
    launched, outputs = [], []
    for machine in range(machines):
        rank = ["--machine_rank", str(machine)] if machines > 1 else []
        words = [*command, *rank, str(HERE / "engine_worker.py"), str(plan_file)]
        outputs.append(folder / f"machine_{machine}.txt")
        with outputs[-1].open("w") as output:
            process = subprocess.Popen(words, env=environment(on_cpu), stdout=output, stderr=subprocess.STDOUT)
        launched.append(process)
    statuses = [process.wait(timeout=400) for process in launched]
    assert not any(statuses), "".join(output.read_text()[-6000:] for output in outputs)


def environment(on_cpu: bool) -> dict[str, str]:
    paths = [str(ROOT), str(HERE.parent), str(HERE)]
    variables = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    return variables | {"ACCELERATE_USE_CPU": "true"} if on_cpu else variables


def same(rows: list[dict], expected: list[dict], rel: float) -> None:
    assert curve(rows) == pytest.approx(curve(expected), rel=rel)
    assert curve(rows, "train/grad_norm") == pytest.approx(curve(expected, "train/grad_norm"), rel=10 * rel)
    assert curve(rows, "eval/loss") == pytest.approx(curve(expected, "eval/loss"), rel=rel)
    assert curve(rows, "eval/tokens") == curve(expected, "eval/tokens")
    assert curve(rows, "level/1/updates") == curve(expected, "level/1/updates")
