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
    RUNS,
    SAVED_STEP,
    Launched,
    deepspeed_has_fp16,
    plan,
    run_plan,
    same,
)
from safetensors import safe_open
from safetensors.torch import load_file
from training_runs import curve

from hope_hf.training.preflight.checks import CHECKS

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("engines")]
NEEDS_FP16 = pytest.mark.skipif(not deepspeed_has_fp16(), reason="this CPU has no fp16 arithmetic for ZeRO")


def marks(engine: str, run: str) -> list:
    if not engine.startswith("deepspeed"):
        return []
    return [NEEDS_DEEPSPEED, NEEDS_FP16] if run in FP16 else [NEEDS_DEEPSPEED]


def each(*runs: str) -> list:
    """(engine, run) for every engine that makes one of these runs."""
    pairs = []
    for engine, (_, runs_of_engine) in ENGINES.items():
        for run in runs_of_engine:
            if run in runs:
                pairs.append(pytest.param(engine, run, marks=marks(engine, run), id=f"{engine}-{run}"))
    return pairs


def json_rows(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.open()]


def check_continued(folder: Path) -> None:
    """A finished run was continued, not begun again, which would give the same curve."""
    steps = RUNS["hope"][1]
    expected = [steps, *range(SAVED_STEP + 1, steps + 1)]
    beats = json_rows(folder / "processes" / "heartbeat_rank0.jsonl")
    assert [beat["step"] for beat in beats[-len(expected) :]] == expected


def check_metrics(rows: list[dict], expected: list[dict], prefix: str, rel: float) -> None:
    """All metrics whose names begin with `prefix` are the expected ones."""
    for metric in expected[0]:
        if metric.startswith(prefix):
            assert curve(rows, metric) == pytest.approx(curve(expected, metric), rel=rel), metric


CURVES = each("hope", "hope-sparse", "llama", "gpt2", "muon", "shards", "loaded")


@pytest.mark.parametrize(("engine", "name"), CURVES)
def test_engine_gives_the_curve_of_one_process(launched, engine, name):
    single = launched("single").rows[name]
    rows = launched(engine).rows[name]
    assert len(curve(single)) == RUNS[name][1]
    if engine == "single_bf16":
        assert curve(rows) == pytest.approx(curve(single), rel=2e-2)
        assert curve(rows) != pytest.approx(curve(single), rel=1e-5)
        weights = load_file(launched(engine).folder / name / "model.safetensors")
        assert {weight.dtype for weight in weights.values()} == {torch.float32}
        return
    same(rows, single, rel=1e-5)
    check_metrics(rows, single, "memory/", rel=1e-3)
    check_metrics(rows, single, "sparse/", rel=1e-4)


@pytest.mark.parametrize(("engine", "name"), each("drawn"))
def test_shards_that_are_drawn_begin_as_a_whole_model_does(launched, engine, name):
    """With other values of the same distribution, which tests/training/test_initial.py compares."""
    rows = launched(engine).rows[name]
    single = launched("single").rows[name]
    for metric, rel in (("train/loss", 0.05), ("train/grad_norm", 0.5)):
        assert curve(rows, metric) == pytest.approx(curve(single, metric), rel=rel)
        assert curve(rows, metric) != curve(single, metric)


def scores_in(folder: Path) -> dict[str, torch.Tensor]:
    """Of a saved model the maps that score tokens, which are buffers."""
    weights = load_file(folder / "model.safetensors")
    scores = {name: tensor for name, tensor in weights.items() if ".scores." in name}
    assert len(scores) == 4
    return scores


@pytest.mark.parametrize(("engine", "name"), each("hope-sparse"))
def test_buffers_are_saved_and_stay_as_they_are(launched, engine, name):
    folder = launched(engine).folder / name
    single = launched("single").folder / name
    expected = scores_in(single)
    for saved in (folder, folder / f"checkpoint-{SAVED_STEP}", single / f"checkpoint-{SAVED_STEP}"):
        for buffer, tensor in scores_in(saved).items():
            assert torch.equal(tensor, expected[buffer]), (saved, buffer)


@pytest.mark.parametrize(("engine", "name"), each("drawn"))
def test_buffers_are_drawn_where_shards_are(launched, engine, name):
    scores = scores_in(launched(engine).folder / name)
    weight = scores["model.layers.2.mixer.scores.up_weight"]
    assert float(weight.std()) == pytest.approx(weight.shape[1] ** -0.5, rel=0.1)


def test_every_process_writes_its_files_and_one_prints(launched):
    ddp = launched("ddp")
    printed = ddp.output("hope")
    assert "x 2 process(es)" in printed
    assert printed.count("step 5/5 | loss") == 1
    files = ddp.files("hope", "heartbeat_rank*.jsonl")
    assert len(files) == 2
    for file in files:
        assert [beat["step"] for beat in json_rows(file)] == [1, 2, 3, 4, 5]
    assert not ddp.files("hope", "stacks_rank*.txt")


@pytest.mark.parametrize(("engine", "name"), each("continued"))
def test_continued_run_is_the_uninterrupted_one(launched, engine, name):
    launch = launched(engine)
    same(launch.rows[name], launch.rows["hope"], rel=1e-6)
    check_continued(launch.folder / "hope")


@pytest.mark.parametrize("engine", [pytest.param(name, marks=marks(name, "hope")) for name in sorted(IN_PARTS)])
def test_engine_saves_weights_in_parts(launched, engine):
    """At the end, too: no process gathers the whole model."""
    run = launched(engine).folder / "hope"
    parts = {path.name for path in run.glob("*/model*.safetensors")}
    assert parts == {"model-rank0.safetensors", "model-rank1.safetensors"}
    assert not (run / "model.safetensors").exists()
    assert (run / "all_results.json").exists()


@pytest.mark.parametrize(("engine", "name"), each("moved"))
def test_run_of_another_number_of_processes_goes_on_under_the_engine(launched, engine, name):
    """It reads the next rows, none twice: other rows would have other losses."""
    same(launched(engine).rows[name], launched("single").rows["hope"], rel=1e-5)
    check_continued(launched(engine).folder / name)


@NEEDS_DEEPSPEED
def test_runs_of_engines_go_on_in_one_process(launched, corpus, tmp_path):
    continued = plan(corpus, 1, ["continued"])["continued"]
    runs = {}
    for engine in ("fsdp2", "fsdp1", "fsdp_hybrid", "deepspeed_zero2", "deepspeed_zero3"):
        runs[engine] = continued | {"source": str(launched(engine).folder / "hope")}
    for engine, rows in run_plan("single", 1, runs, tmp_path).items():
        check_continued(tmp_path / engine)
        same(rows, launched("single").rows["hope"], rel=1e-5)


# Processes among which the parameters are divided.
PARTS = {"fsdp2": 2, "fsdp1": 2, "deepspeed_zero3_offload": 2}


def number(text: str) -> int:
    return int(text.replace(",", ""))


@pytest.mark.parametrize(("engine", "name"), each("dry"))
def test_a_dry_run_takes_the_step_of_the_engine(launched, engine, name):
    """accelerate itself drops FSDP on a CPU and trains lone copies: each process holds its part."""
    printed = launched(engine).output(name)
    part = number(re.search(r"([\d,]+) parameters", printed)[1]) / PARTS[engine]
    counts = re.findall(r"holds ([\d,]+) float32", printed)
    assert [number(count) for count in counts] == pytest.approx([part] * ENGINES[engine][0], rel=0.1), printed
    lines = re.findall(r"^(ok|warn|fail) +(\w+) +(.+)$", printed, re.MULTILINE)
    assert [check for _, check, _ in lines] == [*CHECKS, "step"]
    assert {level for level, _, _ in lines} == {"ok"}
    assert lines[-1][2].startswith("loss 5.")
    assert not (launched(engine).folder / name).exists()


def memory(launch: Launched, rank: int, name: str = "hope", event: str = "step") -> dict:
    """The rank's memory row of an event in a run's first step."""
    for row in json_rows(launch.files(name, "ram_rank*.jsonl")[rank]):
        if row["event"] == event and row["step"] == 1:
            return row
    raise AssertionError(f"rank {rank} of {name} has no row of {event}")


@pytest.mark.parametrize(("engine", "name"), each("reduced"))
def test_gradients_reduced_after_every_batch_are_the_same_and_less(launched, engine, name):
    launch = launched(engine)
    same(launch.rows[name], launch.rows["llama"], rel=1e-5)
    for rank in (0, 1):
        whole = memory(launch, rank, "llama", "last batch")["gradients_gib"]
        part = memory(launch, rank, name, "last batch")["gradients_gib"]
        weights = memory(launch, rank, name)["parameters_gib"]
        assert whole == pytest.approx(2 * weights, rel=1e-3)
        assert part == pytest.approx(weights, rel=1e-3)
        card = f"gradients  whole between 4 batches: {whole:.3g} GiB per process; --sync_each_batch: {part:.3g}"
        assert card in launch.output("llama")
        card = f"gradients  sharded between 4 batches: {part:.3g} GiB per process (whole: {whole:.3g})"
        assert card in launch.output(name)


Stretch = tuple[int, int]


def audited(folder: Path) -> dict[tuple[str, str], tuple[list[int], list[Stretch]]]:
    """By kind and name, each tensor's shape and the stretches that the processes hold, copies left out."""
    tensors = {}
    for file in folder.glob("processes/parameters_rank*.tsv"):
        for row in csv.DictReader(file.open(), delimiter="\t"):
            key = row["kind"], row["name"]
            shape, stretches = tensors.setdefault(key, (json.loads(row["shape"]), []))
            assert shape == json.loads(row["shape"])
            if row["copy"] == "False" and row["start"] != row["end"]:
                stretches.append((int(row["start"]), int(row["end"])))
    return tensors


@pytest.mark.parametrize(("engine", "name"), [("single", "hope"), *each("hope")])
def test_the_parts_of_all_processes_make_the_model(launched, engine, name):
    tensors = audited(launched(engine).folder / name)
    whole = launched("single").folder / name
    shapes = {key: shape for key, (shape, _) in tensors.items()}
    assert shapes == {key: shape for key, (shape, _) in audited(whole).items()}
    # Tied parameters have one row with all their names, and the file has one of these.
    by_name = {}
    for (_, joined), shape in shapes.items():
        by_name.update(dict.fromkeys(joined.split(" = "), shape))
    with safe_open(whole / "model.safetensors", "pt") as file:
        saved = {key: list(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
    assert saved.items() <= by_name.items()
    assert len(saved) == sum(kind == "parameter" for kind, _ in tensors)
    for (_, joined), (shape, stretches) in tensors.items():
        end = 0
        for start, next_end in sorted(stretches):
            assert start == end, joined
            end = next_end
        assert end == math.prod(shape), joined


# Besides its part of the weights, or the whole ones, DeepSpeed keeps another copy of its part.
SHARES = {
    "fsdp2": (0.5, 0.5, 0.5),
    "fsdp1": (0.5, 0.5, 0.5),
    "deepspeed_zero2": (1.5, 0.5, 0.5),
    "deepspeed_zero3": (1.0, 0.5, 0.5),
}


@pytest.mark.parametrize("engine", [pytest.param(name, marks=marks(name, "hope")) for name in SHARES])
def test_a_process_holds_its_part_of_a_replica(launched, engine):
    replica = memory(launched("ddp"), 0)
    for name, share in zip(("parameters_gib", "gradients_gib", "optimizer_gib"), SHARES[engine], strict=True):
        assert replica[name] == memory(launched("single"), 0)[name]
        for rank in (0, 1):
            assert memory(launched(engine), rank)[name] == pytest.approx(share * replica[name], rel=0.1), name


@pytest.mark.parametrize(("engine", "name"), each("poisoned"))
def test_non_finite_step_of_one_process_is_skipped_by_all(launched, engine, name):
    rows = launched(engine).rows[name]
    assert curve(rows, "train/skipped_steps") == [0, 1, 1, 1]
    losses, expected = curve(rows), curve(launched("single").rows[name])
    del losses[POISONED_STEP - 1], expected[POISONED_STEP - 1]
    assert losses == pytest.approx(expected, rel=1e-5)


def without_none(rows: list[dict], metric: str) -> list[float]:
    """The metric of every step, 0 in a step that was left out."""
    return [value or 0.0 for value in curve(rows, metric)]


def check_fp16(engine: str, rows: list[dict], single: list[dict]) -> None:
    """If one process's gradient overflows, all leave the step out and lower the scale; not if its loss does."""
    steps = range(1, RUNS["fp16"][1] + 1)
    assert curve(rows, "train/overflowed_steps") == [float(step >= POISONED_STEP) for step in steps]
    assert curve(rows, "train/skipped_steps") == [float(step >= LATER_POISONED_STEP) for step in steps]
    for name, rel in (("train/loss", 2e-3), ("train/grad_norm", 1e-2)):
        assert without_none(rows, name) == pytest.approx(without_none(single, name), rel=rel)
    assert [step for step, loss in zip(steps, curve(rows), strict=True) if loss is None] == [LATER_POISONED_STEP]
    norms = zip(steps, curve(rows, "train/grad_norm"), strict=True)
    assert [step for step, norm in norms if norm is None] == [POISONED_STEP, LATER_POISONED_STEP]
    # DeepSpeed lowers it at the second overflow (its `hysteresis`).
    lowered = 2.0**16 if engine.startswith("deepspeed") else 2.0**15
    assert curve(rows, "train/loss_scale") == [2.0**16 if step <= POISONED_STEP else lowered for step in steps]


@pytest.mark.parametrize(("engine", "name"), each("fp16"))
def test_engine_in_fp16_follows_one_process(launched, engine, name):
    rows = launched(engine).rows[name]
    single = launched("single").rows[name]
    check_fp16(engine, rows, single)
    check_metrics(rows[:1], single[:1], "memory/", rel=1e-2)
    in_fp32 = launched("single").rows["hope"][0]["train/loss"]
    assert single[0]["train/loss"] == pytest.approx(in_fp32, rel=2e-3)
    assert single[0]["train/loss"] != in_fp32
    folder = launched(engine).folder / name
    for config in (folder / "config.json", folder / f"checkpoint-{SAVED_STEP}" / "config.json"):
        assert json.loads(config.read_text())["dtype"] == "float32"


@pytest.mark.parametrize(("engine", "name"), each("fp16 continued"))
def test_continued_run_in_fp16_is_the_uninterrupted_one(launched, engine, name):
    rows = launched(engine).rows
    for metric in ("train/loss", "train/loss_scale", "train/overflowed_steps"):
        assert without_none(rows[name], metric) == pytest.approx(without_none(rows["fp16"], metric), rel=1e-6)


@pytest.fixture(scope="module")
def on_gpus(corpus, tmp_path_factory):
    """`on_gpus(engine)`: the rows of its runs in fp16, and of one in fp32 in which nothing overflows."""
    rows_of_engines = {}

    def get(engine: str) -> dict[str, list[dict]]:
        if engine not in rows_of_engines:
            processes = 1 if engine == "single" else 2
            if torch.cuda.device_count() < processes:
                pytest.skip(f"{engine} needs {processes} GPU(s)")
            runs = plan(corpus, processes, FP16)
            runs["fp32"] = {"flags": runs["fp16"]["flags"]}
            folder = tmp_path_factory.mktemp(engine)
            rows_of_engines[engine] = run_plan(engine, processes, runs, folder, on_cpu=False)
        return rows_of_engines[engine]

    return get


@pytest.mark.gpu
@pytest.mark.parametrize(
    "engine", ["single", "ddp", "fsdp2", "fsdp1", pytest.param("deepspeed_zero3", marks=NEEDS_DEEPSPEED)]
)
def test_engine_on_gpus_trains_in_fp16(on_gpus, engine):
    rows = on_gpus(engine)
    check_fp16(engine, rows["fp16"], on_gpus("single")["fp16"])
    assert curve(rows["fp16"])[:POISONED_STEP] == pytest.approx(curve(rows["fp32"])[:POISONED_STEP], rel=2e-3)
    assert curve(rows["fp16 continued"])[SAVED_STEP:] == pytest.approx(curve(rows["fp16"])[SAVED_STEP:], rel=1e-6)
