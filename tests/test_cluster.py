"""docs/cluster/: node.sh begins again until the run is complete; the templates can be read and agree with it."""

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
CLUSTER = ROOT / "docs/cluster"
NODE = CLUSTER / "node.sh"
# Writes its arguments down, then does what the next line of the file `acts` says.
LAUNCHER = """#!/usr/bin/env bash
printf '%s\\n' "$*" >> "$RUN/calls"
act=$(head -n 1 "$RUN/acts"); sed -i 1d "$RUN/acts"
eval "$act"
"""
COMPLETE = """echo '{"complete": true}' > "$RUN/run.json\""""


class Pretended:
    """node.sh with a launcher that does not train."""

    def __init__(self, folder: Path):
        self.run = folder / "run"
        self.run.mkdir()
        programs = folder / "bin"
        programs.mkdir()
        (programs / "accelerate").write_text(LAUNCHER)
        (programs / "accelerate").chmod(0o755)
        self.environment = os.environ | {"PATH": f"{programs}:{os.environ['PATH']}", "RUN": str(self.run)}

    def start(self, *acts: str, node: int = 0, **variables: str) -> subprocess.Popen:
        (self.run / "acts").write_text("".join(f"{act}\n" for act in acts))
        place = {"NODES": "4", "GPUS": "8", "NODE": str(node), "HEAD": "first", "PAUSE_SECONDS": "0"} | variables
        return subprocess.Popen(
            ["bash", str(NODE), "recipes/pilot.yaml", "--seed", "7"],
            env=self.environment | place, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def ended(self, *acts: str, **variables) -> tuple[int, str]:
        process = self.start(*acts, **variables)
        _, said = process.communicate(timeout=60)
        return process.returncode, said

    def calls(self) -> list[str]:
        file = self.run / "calls"
        return file.read_text().splitlines() if file.exists() else []


@pytest.fixture
def node(tmp_path) -> Pretended:
    return Pretended(tmp_path)


def test_a_machine_begins_again_until_the_run_is_complete(node):
    # A launcher may end with 0 before the run is complete: after SIGTERM to another machine.
    status, said = node.ended("exit 1", "exit 0", COMPLETE)
    assert status == 0 and len(node.calls()) == 3
    assert "node 0: the launcher ended with status 1, and the run is not complete: starting again" in said
    # A machine that comes late does not wait for the others.
    assert node.ended("exit 1") == (0, "") and len(node.calls()) == 3


def test_it_gives_up_where_no_start_leaves_a_checkpoint(node):
    status, said = node.ended(*["exit 1"] * 9, STARTS="3")
    assert status == 1 and len(node.calls()) == 3
    assert "node 0: gave up after 3 starts without a new checkpoint" in said


@pytest.mark.parametrize("ends_at_once", [True, False])
def test_sigterm_reaches_the_launcher_and_nothing_starts_again(node, ends_at_once):
    ending = "exit 143" if ends_at_once else "sleep 1; touch $RUN/saved; exit 0"
    trap = f"trap 'touch $RUN/told; {ending}' TERM"
    process = node.start(f"{trap}; touch $RUN/ready; while :; do sleep 0.05; done")
    deadline = time.monotonic() + 30
    while not (node.run / "ready").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 75 and len(node.calls()) == 1
    assert (node.run / "told").exists()
    assert (node.run / "saved").exists() is not ends_at_once


@pytest.mark.parametrize("number", [0, 3])
def test_the_launcher_gets_its_place(node, number):
    assert node.ended(COMPLETE, node=number, PORT="1234", MEET_SECONDS="5")[0] == 0
    (call,) = node.calls()
    for words in (
        "--num_machines 4 --num_processes 32",
        f"--machine_rank {number} --main_process_ip first --main_process_port 1234",
        f"is_host={str(number == 0).lower()},join_timeout=5",
        f"run_clm.py recipes/pilot.yaml --seed 7 --output_dir {node.run}",
    ):
        assert words in call


def variables_of_node() -> set[str]:
    """Those without which it does not start."""
    return set(re.findall(r"\$\{(\w+):\?\}", NODE.read_text(encoding="utf-8")))


def test_kubernetes_sets_what_node_needs():
    _, job = yaml.safe_load_all((CLUSTER / "kubernetes.yaml").read_text(encoding="utf-8"))
    spec = job["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    environment = {entry["name"]: entry.get("value") for entry in container["env"]}
    assert variables_of_node() <= environment.keys()
    assert (ROOT / container["command"][1]).samefile(NODE)
    assert int(environment["NODES"]) == spec["completions"] == spec["parallelism"]
    assert int(environment["GPUS"]) == container["resources"]["limits"]["nvidia.com/gpu"]
    assert environment["HEAD"] == f"{job['metadata']['name']}-0.{pod['subdomain']}"
