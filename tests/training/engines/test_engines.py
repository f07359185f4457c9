"""Every engine gives the curve of one process, for every model, and continues exactly.

One launch per engine trains all models in turn; the runs on one process, which all engines share, are made once.
"""

import csv
import json
import math
from pathlib import Path

import pytest
import torch
from engine_runs import NEEDS_DEEPSPEED, ROWS, SMALL, run_plan, same
from safetensors import safe_open
from training_runs import GPT2, HOPE, HOPE_ATTENTION, HOPE_SPARSE, LLAMA, curve

from hope_hf.optim import RULES


def deepspeed_has_fp16() -> bool:
    """DeepSpeed's own check before it trains in fp16 on a CPU."""
    try:
        return torch.ops.mkldnn._is_mkldnn_fp16_supported()
    except (AttributeError, RuntimeError):
        return False


pytestmark = [
    pytest.mark.processes,
    pytest.mark.usefixtures("warm_python"),
    # On one worker of pytest-xdist, to share the runs on one process.
    pytest.mark.xdist_group("engines"),
]
FP16 = ["fp16", "fp16 continued"]
NEEDS_FP16 = pytest.mark.skipif(not deepspeed_has_fp16(), reason="this CPU has no fp16 arithmetic for ZeRO")
OF_MATRICES = [name for name, rule in RULES.items() if rule.needs_matrices]
OF_FSDP2 = [
    "hope", "hope-attention", "hope-sparse", "llama", "reduced", "gpt2", *OF_MATRICES, "poisoned", *FP16,
    "continued", "moved",
]  # fmt: skip
# Processes, and what is run on them.
ENGINES = {
    "ddp": (2, ["hope", "hope-sparse", "muon", "poisoned", "fp16", "moved"]),
    "fsdp2": (2, OF_FSDP2),
    "fsdp1": (2, ["hope", "llama", "reduced", "gpt2", "poisoned", "fp16", "moved"]),
    "fsdp_hybrid": (4, ["hope", "llama", "moved"]),
    "fsdp_offload": (2, ["llama", "poisoned"]),
    "multi_node_fsdp": (2, ["llama"]),
    "deepspeed_zero2": (2, ["hope", "llama", "poisoned", *FP16, "continued", "moved"]),
    "deepspeed_zero3": (2, ["hope", "hope-sparse", "llama", "gpt2", "poisoned", *FP16, "continued", "moved"]),
    "deepspeed_zero3_offload": (2, ["llama", "poisoned"]),
}


def each(*runs: str) -> list:
    """(engine, run) for every engine that makes one of these runs."""
    pairs = [(engine, run) for engine, (_, own) in ENGINES.items() for run in own if run in runs]
    return [pytest.param(*pair, marks=marks(*pair), id="-".join(pair)) for pair in pairs]


def marks(engine: str, run: str) -> list:
    if not engine.startswith("deepspeed"):
        return []
    return [NEEDS_DEEPSPEED, NEEDS_FP16] if run in FP16 else [NEEDS_DEEPSPEED]


# Model, optimizer steps, and the accumulated batches per step with several processes.
RUNS = {
    "hope": (HOPE, 11, 1),
    "hope-attention": (HOPE_ATTENTION, 6, 1),
    "hope-sparse": (HOPE_SPARSE, 6, 2),
    "llama": (LLAMA, 6, 4),
    "gpt2": (GPT2, 6, 1),
    # M3 divides by the square root of V: with a small epsilon the rounding of entries near 0 decides the update.
    **{name: ([*HOPE, "--optimizer", name, "--adam_epsilon", "1e-3"], 6, 1) for name in OF_MATRICES},
    "poisoned": (LLAMA, 6, 1),
    "fp16": (HOPE, 9, 1),
}
# Here the run "hope" saves its weights in parts, from which "moved" of other launches and one process continue.
IN_PARTS = {"fsdp1", "fsdp_hybrid", "deepspeed_zero3"}
# Runs in which no process ever holds the whole model; they continue (from parts under the hybrid).
SHARDED_FROM_THE_START = {"fsdp2": ["moved"], "fsdp_hybrid": ["moved"]}
# The engine whose checkpoint the run "moved" continues: one process, or two processes for four.
SOURCES = {"fsdp_hybrid": "fsdp2"}
POISONED_STEP = 3
LATER_POISONED_STEP = 5
# Within a period of the second level, whose clock is saved too.
SAVED_STEP = 7


def plan(
    corpus: list[str], processes: int, wanted: list[str], source: Path | None, engine: str | None = None
) -> dict[str, dict]:
    """The wanted runs for one launch, in their order; `source` holds the runs of another one."""
    runs = {}
    for name, (model, steps, accumulated) in RUNS.items():
        accumulated = min(accumulated, ROWS // processes) if processes > 1 else 1
        rows = ROWS // processes // accumulated
        batch = ["--per_device_train_batch_size", str(rows), "--gradient_accumulation_steps", str(accumulated)]
        length = ["--max_train_steps", str(steps), "--checkpointing_steps", str(SAVED_STEP)]
        runs[name] = {"flags": [*model, *corpus, *SMALL, *batch, *length]}
    runs["poisoned"]["poison"] = [POISONED_STEP, processes - 1]
    runs["fp16"] |= {"overflow": [POISONED_STEP, processes - 1], "poison": [LATER_POISONED_STEP, processes - 1]}
    # After the steps that it trains again.
    again = {"forget": [RUNS["fp16"][1]], "overflow": [RUNS["fp16"][1], 0]}
    runs["fp16 continued"] = {"flags": runs["fp16"]["flags"], **again}
    if engine in IN_PARTS:
        runs["hope"]["flags"] += ["--save_sharded"]
    runs["reduced"] = {"flags": [*runs["llama"]["flags"], "--sync_each_batch"]}
    runs["continued"] = {"flags": runs["hope"]["flags"], "forget": [RUNS["hope"][1]]}
    # Two ways to continue after the first checkpoint: with its own, and with another launch's.
    # The latter recomputes its mixers, which changes no number.
    recomputing = [*runs["hope"]["flags"], "--gradient_checkpointing", "mixer"]
    runs["moved"] = {"flags": recomputing, "forget": [RUNS["hope"][1]], "source": f"{source}/hope"}
    for name in SHARDED_FROM_THE_START.get(engine, ()):
        runs[name]["flags"] = [*runs[name]["flags"], "--init", "sharded"]
    return {name: run for name, run in runs.items() if name in wanted}


@pytest.fixture(scope="module")
def rows(tmp_path_factory, corpus):
    """`rows(engine)`: the rows of all its runs, launched at the first call."""
    launched, folders = {}, {}

    def get(engine: str) -> dict[str, list[dict]]:
        if engine not in launched:
            # A failed launch fails every test of its engine, and is not repeated.
            launched[engine] = None
            source = SOURCES.get(engine, "single")
            if engine != "single":
                get(source)
            processes, runs = ENGINES.get(engine, (1, list(RUNS)))
            if engine.startswith("deepspeed") and not deepspeed_has_fp16():
                runs = [run for run in runs if run not in FP16]
            folders[engine] = tmp_path_factory.mktemp(engine)
            runs = plan(corpus, processes, runs, folders.get(source), engine)
            launched[engine] = run_plan(engine, processes, runs, folders[engine])
        assert launched[engine] is not None, f"the launch of {engine} has failed"
        return launched[engine]

    get.folders = folders
    return get


def went_on(folder: Path, saved: int = SAVED_STEP) -> None:
    """Check that a finished run was continued, not begun again, which would give the same curve."""
    beats = [json.loads(line)["step"] for line in (folder / "processes" / "heartbeat_rank0.jsonl").open()]
    steps = RUNS["hope"][1]
    expected = [steps, *range(saved + 1, steps + 1)]
    assert beats[-len(expected) :] == expected


CURVES = each("hope", "hope-attention", "hope-sparse", "llama", "gpt2", *OF_MATRICES)


@pytest.mark.parametrize(("engine", "name"), CURVES)
def test_engine_gives_the_curve_of_one_process(rows, engine, name):
    single = rows("single")[name]
    assert len(curve(single)) == RUNS[name][1]
    same(rows(engine)[name], single, rel=1e-5)


@pytest.mark.parametrize(("engine", "name"), each("hope"))
def test_telemetry_of_memories_is_that_of_one_process(rows, engine, name):
    single, own = rows("single")[name], rows(engine)[name]
    names = {name for name in single[0] if name.startswith("memory/")}
    assert any(name.endswith("initial_state_grad_norm") for name in names)
    for name in names:
        assert curve(own, name) == pytest.approx(curve(single, name), rel=1e-3), name


@pytest.mark.parametrize(("engine", "name"), each("hope-sparse"))
def test_telemetry_of_sparse_attention_counts_every_token_of_all_processes(rows, engine, name):
    single, own = rows("single")[name], rows(engine)[name]
    names = [name for name in single[0] if name.startswith("sparse/")]
    # the second layer, and all together
    assert len(names) == 26 and {name.split("/")[1] for name in names} == {"1", "all"}
    # two heads of keys a token
    assert set(curve(single, "sparse/1/rows")) == {ROWS * 32}
    for name in names:
        assert curve(own, name) == pytest.approx(curve(single, name), rel=1e-4), name


@pytest.mark.parametrize(("engine", "name"), each("continued"))
def test_continued_run_is_the_uninterrupted_one(rows, engine, name):
    same(rows(engine)[name], rows(engine)["hope"], rel=1e-6)
    went_on(rows.folders[engine] / "hope")


@pytest.mark.parametrize("engine", [pytest.param(name, marks=marks(name, "hope")) for name in sorted(IN_PARTS)])
def test_engine_saves_weights_in_parts(rows, engine):
    """At the end, too: no process gathers the whole model."""
    rows(engine)
    run = rows.folders[engine] / "hope"
    parts = [path.name for path in run.glob("*/model*.safetensors")]
    assert {"model-rank0.safetensors", "model-rank1.safetensors"} == set(parts)
    assert not (run / "model.safetensors").exists() and (run / "all_results.json").exists()


@pytest.mark.parametrize(("engine", "name"), each("moved"))
def test_run_of_another_number_of_processes_goes_on_under_the_engine(rows, engine, name):
    """It reads the next rows, none twice: other rows would have other losses."""
    same(rows(engine)[name], rows("single")["hope"], rel=1e-5)
    went_on(rows.folders[engine] / name)


def test_a_run_goes_on_from_two_processes_to_one_and_to_two_again(rows, corpus, tmp_path):
    rows("fsdp2")
    source = rows.folders["fsdp2"]
    for config, processes, saved in (("single", 1, SAVED_STEP), ("ddp", 2, SAVED_STEP + 3)):
        runs = plan(corpus, processes, ["moved"], source)
        # One more checkpoint in between, from which the next launch continues.
        runs["moved"]["flags"] += ["--checkpointing_steps", str(SAVED_STEP + 3)]
        source = tmp_path / config
        source.mkdir()
        same(run_plan(config, processes, runs, source)["moved"], rows("single")["hope"], rel=1e-5)
        went_on(source / "moved", saved)
        (source / "moved").rename(source / "hope")


@NEEDS_DEEPSPEED
def test_runs_of_engines_go_on_in_one_process(rows, corpus, tmp_path):
    flags = plan(corpus, 1, ["hope"], None)["hope"]["flags"]
    runs = {}
    for engine in ("fsdp2", "fsdp1", "fsdp_hybrid", "deepspeed_zero2", "deepspeed_zero3"):
        rows(engine)
        runs[engine] = {"flags": flags, "forget": [RUNS["hope"][1]], "source": str(rows.folders[engine] / "hope")}
    for engine, own in run_plan("single", 1, runs, tmp_path).items():
        went_on(tmp_path / engine)
        same(own, rows("single")["hope"], rel=1e-5)


def memory(rows, engine: str, rank: int, name: str = "hope", event: str = "step") -> dict:
    """The rank's memory row of an event in a run's first step."""
    rows(engine)
    file = rows.folders[engine] / name / "processes" / f"ram_rank{rank}.jsonl"
    return next(row for row in map(json.loads, file.open()) if (row["event"], row["step"]) == (event, 1))


@pytest.mark.parametrize(("engine", "name"), each("reduced"))
def test_gradients_reduced_after_every_batch_are_the_same_and_less(rows, engine, name):
    same(rows(engine)[name], rows(engine)["llama"], rel=1e-5)
    card = (rows.folders[engine] / "machine_0.txt").read_text()
    for rank in (0, 1):
        whole, part = (memory(rows, engine, rank, run, "last batch")["gradients_gib"] for run in ("llama", name))
        weights = memory(rows, engine, rank, name)["parameters_gib"]
        assert whole == pytest.approx(2 * weights, rel=1e-3) and part == pytest.approx(weights, rel=1e-3)
        held = f"{whole:.3g} GiB per process"
        assert f"gradients  whole between 4 batches: {held}; --sync_each_batch: {part:.3g}" in card
        assert f"gradients  sharded between 4 batches: {part:.3g} GiB per process (whole: {whole:.3g})" in card


def audited(folder: Path) -> dict[tuple[str, str], tuple[list[int], list[tuple[int, int]]]]:
    """By kind and name, each tensor's shape and the stretches that the processes hold, copies left out."""
    found = {}
    for file in folder.glob("processes/parameters_rank*.tsv"):
        for row in csv.DictReader(file.open(), delimiter="\t"):
            shape, stretches = found.setdefault((row["kind"], row["name"]), (json.loads(row["shape"]), []))
            assert shape == json.loads(row["shape"])
            if row["copy"] == "False" and row["start"] != row["end"]:
                stretches.append((int(row["start"]), int(row["end"])))
    return found


@pytest.mark.parametrize(("engine", "name"), [("single", "hope"), ("single", "llama"), *each("hope", "llama")])
def test_the_parts_of_all_processes_make_the_model(rows, engine, name):
    rows(engine)
    found = audited(rows.folders[engine] / name)
    with safe_open(rows.folders["single"] / name / "model.safetensors", "pt") as file:
        saved = {key: list(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
    # The parameters and buffers of one process, of which the file has the parameters, tied ones once.
    whole = audited(rows.folders["single"] / name)
    shapes = {key: shape for key, (shape, _) in found.items()}
    assert shapes == {key: shape for key, (shape, _) in whole.items()}
    assert saved.items() <= {key: shape for (_, names), shape in shapes.items() for key in names.split(" = ")}.items()
    assert len(saved) == len([kind for kind, _ in found if kind == "parameter"])
    for (_, names), (shape, stretches) in found.items():
        ends = [0, *(end for _, end in sorted(stretches))]
        assert [start for start, _ in sorted(stretches)] == ends[:-1] and ends[-1] == math.prod(shape), names


@pytest.mark.parametrize(("engine", "most"), [("fsdp2", 0.55), ("fsdp1", 0.55)])
def test_a_process_holds_its_part_and_no_more(rows, engine, most):
    """Parameters, gradients and optimizer state after the first step, over those of a whole replica."""

    def held(name: str, rank: int) -> float:
        row = memory(rows, name, rank)
        return row["parameters_gib"] + row["gradients_gib"] + row["optimizer_gib"]

    replica = held("ddp", 0)
    assert replica == held("single", 0)
    assert max(held(engine, 0), held(engine, 1)) / replica <= most


@NEEDS_DEEPSPEED
@pytest.mark.parametrize(("engine", "weights"), [("deepspeed_zero2", 1.5), ("deepspeed_zero3", 1.0)])
def test_zero_shares_out_gradients_and_optimizer_state(rows, engine, weights):
    """Relative to a replica; besides the weights, or its part of them, DeepSpeed keeps another copy of its part."""
    replica = memory(rows, "ddp", 0)
    for name, share in (("parameters_gib", weights), ("gradients_gib", 0.5), ("optimizer_gib", 0.5)):
        own = [memory(rows, engine, rank)[name] for rank in (0, 1)]
        assert own == pytest.approx([share * replica[name]] * 2, rel=0.1), name


@pytest.mark.parametrize(("engine", "name"), each("poisoned"))
def test_non_finite_step_of_one_process_is_skipped_by_all(rows, engine, name):
    steps, own = RUNS[name][1], rows(engine)[name]
    assert curve(own, "train/skipped_steps") == [float(step >= POISONED_STEP) for step in range(1, steps + 1)]
    losses, expected = ([x for x in curve(some) if x is not None] for some in (own, rows("single")[name]))
    assert len(losses) == steps - 1
    assert losses == pytest.approx(expected, rel=1e-5)


def test_one_process_in_bf16_follows_the_curve(rows, corpus, tmp_path):
    runs = plan(corpus, 1, ["llama"], None)
    own, single = run_plan("single_bf16", 1, runs, tmp_path)["llama"], rows("single")["llama"]
    assert curve(own) == pytest.approx(curve(single), rel=2e-2)
    assert curve(own) != pytest.approx(curve(single), rel=1e-5)


def follows_in_fp16(engine: str, own: list[dict], single: list[dict]) -> None:
    """If one process's gradient overflows, all leave the step out and lower the scale; not if its loss does."""
    steps = range(1, RUNS["fp16"][1] + 1)
    assert curve(own, "train/overflowed_steps") == [float(step >= POISONED_STEP) for step in steps]
    assert curve(own, "train/skipped_steps") == [float(step >= LATER_POISONED_STEP) for step in steps]
    for name, rel in (("train/loss", 2e-3), ("train/grad_norm", 1e-2)):
        values, expected = ([x or 0 for x in curve(rows, name)] for rows in (own, single))
        assert values == pytest.approx(expected, rel=rel)
    assert [row["step"] for row in own if row.get("train/loss", 0) is None] == [LATER_POISONED_STEP]
    without = [row["step"] for row in own if row.get("train/grad_norm", 0) is None]
    assert without == [POISONED_STEP, LATER_POISONED_STEP]
    # DeepSpeed lowers it at the second overflow (its `hysteresis`).
    falls = 1 if engine.startswith("deepspeed") else 2
    assert curve(own, "train/loss_scale") == [2.0**16 / (falls if step > POISONED_STEP else 1) for step in steps]


@pytest.mark.parametrize(("engine", "name"), each("fp16"))
def test_engine_in_fp16_follows_one_process(rows, engine, name):
    follows_in_fp16(engine, rows(engine)[name], rows("single")[name])
    folder = rows.folders[engine] / name
    for config in (folder / "config.json", folder / f"checkpoint-{SAVED_STEP}" / "config.json"):
        assert json.loads(config.read_text())["dtype"] == "float32"
    names = {name for name in rows("single")[name][0] if name.startswith("memory/")}
    for name_ in names:
        first, expected = rows(engine)[name][0][name_], rows("single")[name][0][name_]
        assert first == pytest.approx(expected, rel=1e-2), name_


@pytest.mark.parametrize(("engine", "name"), each("fp16 continued"))
def test_continued_run_in_fp16_is_the_uninterrupted_one(rows, engine, name):
    own, whole = rows(engine)[name], rows(engine)["fp16"]
    assert curve(own)[SAVED_STEP:] == pytest.approx(curve(whole)[SAVED_STEP:], rel=1e-6)
    assert curve(own, "train/loss_scale") == curve(whole, "train/loss_scale")
    assert curve(own, "train/overflowed_steps") == curve(whole, "train/overflowed_steps")


@pytest.fixture(scope="module")
def on_gpus(corpus, tmp_path_factory):
    """`on_gpus(engine)`: the rows of its runs in fp16, and of one in fp32 in which nothing overflows."""
    launched = {}

    def get(engine: str) -> dict[str, list[dict]]:
        if engine not in launched:
            processes = 1 if engine == "single" else 2
            if torch.cuda.device_count() < processes:
                pytest.skip(f"{engine} needs {processes} GPU(s)")
            runs = plan(corpus, processes, FP16, None)
            runs["fp32"] = {"flags": runs["fp16"]["flags"]}
            launched[engine] = run_plan(engine, processes, runs, tmp_path_factory.mktemp(engine), on_cpu=False)
        return launched[engine]

    return get


@pytest.mark.gpu
@pytest.mark.parametrize(
    "engine", ["single", "ddp", "fsdp2", "fsdp1", pytest.param("deepspeed_zero3", marks=NEEDS_DEEPSPEED)]
)
def test_engine_on_gpus_trains_in_fp16(on_gpus, engine):
    own = on_gpus(engine)
    follows_in_fp16(engine, own["fp16"], on_gpus("single")["fp16"])
    assert curve(own["fp16"])[:POISONED_STEP] == pytest.approx(curve(own["fp32"])[:POISONED_STEP], rel=2e-3)
    assert curve(own["fp16 continued"])[SAVED_STEP:] == pytest.approx(curve(own["fp16"])[SAVED_STEP:], rel=1e-6)


@pytest.mark.long
def test_gpt2_of_its_real_size_takes_two_steps(corpus, tmp_path):
    gpt2 = ["--model_type", "gpt2", "--config_overrides", "resid_pdrop=0,embd_pdrop=0,attn_pdrop=0"]
    flags = [*gpt2, *corpus, *SMALL, "--max_train_steps", "2", "--checkpointing_steps", "0"]
    curves = {}
    for engine, processes in (("single", 1), ("ddp", 2), ("fsdp2", 2), ("deepspeed_zero3", 2)):
        (tmp_path / engine).mkdir()
        runs = {"gpt2": {"flags": [*flags, "--per_device_train_batch_size", str(2 // processes)]}}
        curves[engine] = curve(run_plan(engine, processes, runs, tmp_path / engine)["gpt2"])
    for engine, own in curves.items():
        assert len(own) == 2 and own == pytest.approx(curves["single"], rel=1e-5), engine
