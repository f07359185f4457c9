"""Every engine gives the curve of one process, for every model, and continues exactly.

Each launch file is launched once (`launched`) and trains all models in turn; all tests of engines read its folder.
"""

import csv
import json
import math
import re
from pathlib import Path

import pytest
import torch
from engine_runs import (
    ENGINES,
    FP16,
    IN_PARTS,
    LATER_POISONED_STEP,
    NEEDS_DEEPSPEED,
    POISONED_STEP,
    ROWS,
    RUNS,
    SAVED_STEP,
    SMALL,
    deepspeed_has_fp16,
    plan,
    run_plan,
    same,
)
from safetensors import safe_open
from training_runs import curve

from hope_hf.training.preflight.checks import CHECKS

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("engines")]
NEEDS_FP16 = pytest.mark.skipif(not deepspeed_has_fp16(), reason="this CPU has no fp16 arithmetic for ZeRO")


def each(*runs: str) -> list:
    """(engine, run) for every engine that makes one of these runs."""
    pairs = [(engine, run) for engine, (_, own) in ENGINES.items() for run in own if run in runs]
    return [pytest.param(*pair, marks=marks(*pair), id="-".join(pair)) for pair in pairs]


def marks(engine: str, run: str) -> list:
    if not engine.startswith("deepspeed"):
        return []
    return [NEEDS_DEEPSPEED, NEEDS_FP16] if run in FP16 else [NEEDS_DEEPSPEED]


def beats(file: Path) -> list[int]:
    return [json.loads(line)["step"] for line in file.open()]


def went_on(folder: Path) -> None:
    """Check that a finished run was continued, not begun again, which would give the same curve."""
    steps = RUNS["hope"][1]
    expected = [steps, *range(SAVED_STEP + 1, steps + 1)]
    assert beats(folder / "processes" / "heartbeat_rank0.jsonl")[-len(expected) :] == expected


CURVES = each("hope", "hope-sparse", "llama", "gpt2", "muon", "shards", "loaded")


@pytest.mark.parametrize(("engine", "name"), CURVES)
def test_engine_gives_the_curve_of_one_process(launched, engine, name):
    single, own = launched("single").rows[name], launched(engine).rows[name]
    assert len(curve(single)) == RUNS[name][1]
    if engine == "single_bf16":
        assert curve(own) == pytest.approx(curve(single), rel=2e-2) != pytest.approx(curve(single), rel=1e-5)
        return
    same(own, single, rel=1e-5)
    for kind, rel in (("memory/", 1e-3), ("sparse/", 1e-4)):
        for metric in single[0]:
            if metric.startswith(kind):
                assert curve(own, metric) == pytest.approx(curve(single, metric), rel=rel), metric


@pytest.mark.parametrize(("engine", "name"), each("drawn"))
def test_shards_that_are_drawn_begin_as_a_whole_model_does(launched, engine, name):
    """With other values of the same distribution, which tests/training/test_initial.py compares."""
    own, single = launched(engine).rows[name], launched("single").rows[name]
    for metric in ("train/loss", "train/grad_norm"):
        assert curve(own, metric) == pytest.approx(curve(single, metric), rel=0.05 if metric == "train/loss" else 0.5)
        assert curve(own, metric) != curve(single, metric)


def test_every_process_writes_its_files_and_one_prints(launched):
    ddp = launched("ddp")
    printed = ddp.output("hope")
    assert "x 2 process(es)" in printed and printed.count("step 5/5 | loss") == 1
    assert [beats(file) for file in ddp.files("hope", "heartbeat_rank*.jsonl")] == [[1, 2, 3, 4, 5]] * 2
    assert not ddp.files("hope", "stacks_rank*.txt")


def test_telemetry_has_all_its_metrics(launched):
    hope, sparse = (launched("single").rows[name][0] for name in ("hope", "hope-sparse"))
    assert any(name.endswith("initial_state_grad_norm") for name in hope)
    names = [name for name in sparse if name.startswith("sparse/")]
    # The second layer, and all together; two heads of keys a token.
    assert len(names) == 26 and {name.split("/")[1] for name in names} == {"1", "all"}
    assert sparse["sparse/1/rows"] == ROWS * 32


@pytest.mark.parametrize(("engine", "name"), each("continued"))
def test_continued_run_is_the_uninterrupted_one(launched, engine, name):
    found = launched(engine)
    same(found.rows[name], found.rows["hope"], rel=1e-6)
    went_on(found.folder / "hope")


@pytest.mark.parametrize("engine", [pytest.param(name, marks=marks(name, "hope")) for name in sorted(IN_PARTS)])
def test_engine_saves_weights_in_parts(launched, engine):
    """At the end, too: no process gathers the whole model."""
    run = launched(engine).folder / "hope"
    parts = [path.name for path in run.glob("*/model*.safetensors")]
    assert {"model-rank0.safetensors", "model-rank1.safetensors"} == set(parts)
    assert not (run / "model.safetensors").exists() and (run / "all_results.json").exists()


@pytest.mark.parametrize(("engine", "name"), each("moved"))
def test_run_of_another_number_of_processes_goes_on_under_the_engine(launched, engine, name):
    """It reads the next rows, none twice: other rows would have other losses."""
    same(launched(engine).rows[name], launched("single").rows["hope"], rel=1e-5)
    went_on(launched(engine).folder / name)


@NEEDS_DEEPSPEED
def test_runs_of_engines_go_on_in_one_process(launched, corpus, tmp_path):
    (run,) = plan(corpus, 1, ["continued"]).values()
    engines = ("fsdp2", "fsdp1", "fsdp_hybrid", "deepspeed_zero2", "deepspeed_zero3")
    runs = {engine: run | {"source": str(launched(engine).folder / "hope")} for engine in engines}
    for engine, own in run_plan("single", 1, runs, tmp_path).items():
        went_on(tmp_path / engine)
        same(own, launched("single").rows["hope"], rel=1e-5)


# Processes among which the parameters are divided; accelerate itself drops FSDP on a CPU and trains lone copies.
PARTS = {"fsdp2": 2, "fsdp1": 2, "fsdp_hybrid": 2, "deepspeed_zero3_offload": 2}


@pytest.mark.parametrize(("engine", "name"), each("dry"))
def test_a_dry_run_takes_the_step_of_the_engine(launched, engine, name):
    printed, processes = launched(engine).output(name), ENGINES[engine][0]
    whole = int(re.search(r"([\d,]+) parameters", printed)[1].replace(",", "")) / PARTS.get(engine, 1)
    held = [int(count.replace(",", "")) for count in re.findall(r"holds ([\d,]+) float32", printed)]
    assert len(held) == processes and all(0.9 * whole < count < 1.1 * whole for count in held), printed
    found = re.findall(r"^(ok|warn|fail) +(\w+) +(.+)$", printed, re.MULTILINE)
    assert [(level, check) for level, check, _ in found] == [("ok", check) for check in [*CHECKS, "step"]]
    assert found[-1][2].startswith("loss 5.")
    assert not (launched(engine).folder / name).exists()


def memory(found, rank: int, name: str = "hope", event: str = "step") -> dict:
    """The rank's memory row of an event in a run's first step."""
    file = found.files(name, "ram_rank*.jsonl")[rank]
    return next(row for row in map(json.loads, file.open()) if (row["event"], row["step"]) == (event, 1))


@pytest.mark.parametrize(("engine", "name"), each("reduced"))
def test_gradients_reduced_after_every_batch_are_the_same_and_less(launched, engine, name):
    found = launched(engine)
    same(found.rows[name], found.rows["llama"], rel=1e-5)
    for rank in (0, 1):
        whole, part = (memory(found, rank, run, "last batch")["gradients_gib"] for run in ("llama", name))
        weights = memory(found, rank, name)["parameters_gib"]
        assert whole == pytest.approx(2 * weights, rel=1e-3) and part == pytest.approx(weights, rel=1e-3)
        held = f"{whole:.3g} GiB per process"
        card = f"gradients  whole between 4 batches: {held}; --sync_each_batch: {part:.3g}"
        assert card in found.output("llama")
        reduced = f"gradients  sharded between 4 batches: {part:.3g} GiB per process (whole: {whole:.3g})"
        assert reduced in found.output(name)


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


@pytest.mark.parametrize(("engine", "name"), [("single", "hope"), *each("hope")])
def test_the_parts_of_all_processes_make_the_model(launched, engine, name):
    found = audited(launched(engine).folder / name)
    whole = launched("single").folder / name
    with safe_open(whole / "model.safetensors", "pt") as file:
        saved = {key: list(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
    # The parameters and buffers of one process, of which the file has the parameters, tied ones once.
    shapes = {key: shape for key, (shape, _) in found.items()}
    assert shapes == {key: shape for key, (shape, _) in audited(whole).items()}
    names = {key: shape for (_, joined), shape in shapes.items() for key in joined.split(" = ")}
    assert saved.items() <= names.items()
    assert len(saved) == len([kind for kind, _ in found if kind == "parameter"])
    for (_, joined), (shape, stretches) in found.items():
        ends = [0, *(end for _, end in sorted(stretches))]
        assert [start for start, _ in sorted(stretches)] == ends[:-1] and ends[-1] == math.prod(shape), joined


# Besides its part of the weights, or the whole ones, DeepSpeed keeps another copy of its part.
SHARES = {
    "fsdp2": (0.5, 0.5, 0.5),
    "fsdp1": (0.5, 0.5, 0.5),
    "deepspeed_zero2": (1.5, 0.5, 0.5),
    "deepspeed_zero3": (1.0, 0.5, 0.5),
}


@pytest.mark.parametrize(
    ("engine", "shares"), [pytest.param(*row, marks=marks(row[0], "hope")) for row in SHARES.items()]
)
def test_a_process_holds_its_part_of_a_replica(launched, engine, shares):
    replica = memory(launched("ddp"), 0)
    for name, share in zip(("parameters_gib", "gradients_gib", "optimizer_gib"), shares, strict=True):
        assert replica[name] == memory(launched("single"), 0)[name]
        own = [memory(launched(engine), rank)[name] for rank in (0, 1)]
        assert own == pytest.approx([share * replica[name]] * 2, rel=0.1), name


@pytest.mark.parametrize(("engine", "name"), each("poisoned"))
def test_non_finite_step_of_one_process_is_skipped_by_all(launched, engine, name):
    steps, own = RUNS[name][1], launched(engine).rows[name]
    assert curve(own, "train/skipped_steps") == [float(step >= POISONED_STEP) for step in range(1, steps + 1)]
    losses, expected = ([x for x in curve(some) if x is not None] for some in (own, launched("single").rows[name]))
    assert len(losses) == steps - 1
    assert losses == pytest.approx(expected, rel=1e-5)


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
def test_engine_in_fp16_follows_one_process(launched, engine, name):
    own, single = launched(engine).rows[name], launched("single").rows[name]
    follows_in_fp16(engine, own, single)
    folder = launched(engine).folder / name
    for config in (folder / "config.json", folder / f"checkpoint-{SAVED_STEP}" / "config.json"):
        assert json.loads(config.read_text())["dtype"] == "float32"
    for metric in single[0]:
        if metric.startswith("memory/"):
            assert own[0][metric] == pytest.approx(single[0][metric], rel=1e-2), metric


@pytest.mark.parametrize(("engine", "name"), each("fp16 continued"))
def test_continued_run_in_fp16_is_the_uninterrupted_one(launched, engine, name):
    own, whole = launched(engine).rows[name], launched(engine).rows["fp16"]
    for metric in ("train/loss", "train/loss_scale", "train/overflowed_steps"):
        # None in the step that is left out.
        values, expected = ([x or 0 for x in curve(rows, metric)] for rows in (own, whole))
        assert values == pytest.approx(expected, rel=1e-6)


@pytest.fixture(scope="module")
def on_gpus(corpus, tmp_path_factory):
    """`on_gpus(engine)`: the rows of its runs in fp16, and of one in fp32 in which nothing overflows."""
    made = {}

    def get(engine: str) -> dict[str, list[dict]]:
        if engine not in made:
            processes = 1 if engine == "single" else 2
            if torch.cuda.device_count() < processes:
                pytest.skip(f"{engine} needs {processes} GPU(s)")
            runs = plan(corpus, processes, FP16)
            runs["fp32"] = {"flags": runs["fp16"]["flags"]}
            made[engine] = run_plan(engine, processes, runs, tmp_path_factory.mktemp(engine), on_cpu=False)
        return made[engine]

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
