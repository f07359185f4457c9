"""Run transformers' common suite on HOPE and on its peers in transformers, and compare: `make hf-suite`.

HF_SUITE names a folder with `tests/` of the installed release of transformers (CONTRIBUTING.md says where it comes
from). Further arguments go to pytest. Exit status 1 if a test of ours fails, or if one that a peer passes is neither
passed nor among the exceptions, or if an exception is not needed.
"""

import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

import transformers

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.hf_suite.exceptions import EXCEPTIONS  # noqa: E402

# our class -> where the peer's tests are, and their class
PEERS = {
    "HopeMemory": ("tests/models/mamba2/test_modeling_mamba2.py", "Mamba2ModelTest"),
    "HopeAttention": ("tests/models/qwen3_next/test_modeling_qwen3_next.py", "Qwen3NextModelTest"),
    "HopeSparseHybrid": ("tests/models/mamba2/test_modeling_mamba2.py", "Mamba2ModelTest"),
    "HopeHybrid": ("tests/models/qwen3_next/test_modeling_qwen3_next.py", "Qwen3NextModelTest"),
}


def main(arguments: list[str]) -> int:
    """Run and compare; returns the exit status."""
    suite = suite_folder("HF_SUITE", "test_modeling_common.py")
    if suite is None:
        return 2
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        run_suite(suite, report, arguments)
        outcomes = read_report(report)
    print_outcomes(f"transformers {transformers.__version__}", outcomes)
    faults = [fault for ours, (_, peer) in PEERS.items() for fault in compare(ours, peer, outcomes)]
    print("\n".join(["", *faults]) if faults else "\nNo test failed, and none is missing that a peer runs.")
    return 1 if faults else 0


def suite_folder(variable: str, file: str) -> Path | None:
    """The folder that an environment variable names; `None` and a sentence if its tests/ has no such file."""
    folder = Path(os.environ.get(variable, ""))
    if (folder / "tests" / file).is_file():
        return folder.resolve()
    print(f"error: {variable} names no folder with tests/{file}: see CONTRIBUTING.md.", file=sys.stderr)
    return None


def print_outcomes(title: str, outcomes: dict[str, dict[str, str]]) -> None:
    """A table: how many tests of each model passed, were skipped and failed."""
    print(f"\n{title}\n\n| model | passed | skipped | failed |\n|---|---|---|---|")
    for name, results in outcomes.items():
        count = Counter(results.values())
        print(f"| {name} | {count['passed']} | {count['skipped']} | {count['failed']} |")


def run_suite(suite: Path, report: Path, arguments: list[str]) -> None:
    """The common tests of ours and of the peers."""
    tests = [ROOT / "tests/hf_suite/common.py", *sorted({suite / file for file, _ in PEERS.values()})]
    run_pytest(suite, tests, report, suite, arguments)


def run_pytest(suite: Path, tests: list[Path], report: Path, folder: Path, arguments: list[str]) -> None:
    """pytest in a process of its own, in which `tests` is that of `suite`; it runs in `folder` and writes `report`."""
    paths = [str(suite), str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "1",
    }
    settings = ["-c", os.devnull, "--rootdir", str(suite), "-q", "-p", "no:cacheprovider", "-W", "ignore"]
    command = [sys.executable, "-m", "pytest", *settings, *map(str, tests), f"--junitxml={report}", *arguments]
    subprocess.run(command, env=environment, cwd=folder)


def read_report(report: Path) -> dict[str, dict[str, str]]:
    """{class: {test: passed, skipped or failed}}"""
    outcomes: dict[str, dict[str, str]] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        kinds = {child.tag for child in case}
        outcome = "skipped" if "skipped" in kinds else "passed"
        if kinds & {"failure", "error"}:
            outcome = "failed"
        outcomes.setdefault(case.get("classname").rpartition(".")[2], {})[case.get("name")] = outcome
    return outcomes


def compare(ours: str, peer: str, outcomes: dict[str, dict[str, str]]) -> list[str]:
    """The problems in the results of one of our classes compared with its peer's, one sentence each."""
    mine, theirs, allowed = outcomes.get(ours, {}), outcomes.get(peer, {}), EXCEPTIONS[ours]
    if not mine or not theirs:
        return [f"{ours} or {peer} ran no test."]
    faults = [f"{ours}.{name} failed." for name, outcome in mine.items() if outcome == "failed"]
    missing = {name for name, outcome in theirs.items() if outcome == "passed" and mine.get(name) == "skipped"}
    faults += [f"{ours}.{name} is skipped, and {peer} passes it." for name in sorted(missing - allowed.keys())]
    faults += [f"{ours}.{name} is an exception without need." for name in sorted(allowed.keys() - missing)]
    return faults


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
