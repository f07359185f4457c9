"""Does a test notice that a core fact is broken? Forty copies of the package, each with one line broken.

    python tests/mutants.py                       all of them; prints a table, ends with 1 if one is not caught
    python tests/mutants.py zeta rotation         those whose name holds one of the words
    python tests/mutants.py --list                names, files and lines, and whether each line still stands

Every mutant is tried in a copy of the working tree, first on the tests that are named beside it, which takes seconds.
With `--whole` the default suite runs where these catch nothing. A line that has moved is an error: find it again, so
that the fact stays in the list.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Mutant:
    """One broken line of `hope_hf/FILE`."""

    name: str
    file: str
    line: str
    broken: str
    tests: str


MUTANTS = [
    # the rule and its gates
    Mutant(
        "a token writes over its neighbour too late",
        "model/memory_delta.py",
        "lower = (keys @ keys.mT * rated_decay).tril(-1)",
        "lower = (keys @ keys.mT * rated_decay).tril(-2)",
        "tests/model/test_equivalence.py",
    ),
    Mutant(
        "the share of the own value without zeta",
        "model/memory_scan.py",
        "return values * self.erased[:, cut].unsqueeze(-1)",
        "return values",
        "tests/model/test_equivalence.py",
    ),
    Mutant(
        "the share of a decoded token without zeta",
        "fast/one_token.py",
        "own_share = own_share * erased",
        "own_share = own_share * 1.0",
        "tests/model/test_equivalence.py",
    ),
    Mutant(
        "zeta's gradient without the value share",
        "fast/delta_span.py",
        "grad_inputs.erased[:, cut] = value_share.squeeze(-1) * grad_share",
        "grad_inputs.erased[:, cut] = grad_share",
        "tests/model/test_native.py",
    ),
    Mutant(
        "retention's gradient summed forward",
        "fast/delta_span.py",
        "grad_inputs.log_retention[:, cut] = grad_total.flip(-1).cumsum(-1).flip(-1)",
        "grad_inputs.log_retention[:, cut] = grad_total.cumsum(-1)",
        "tests/model/test_native.py",
    ),
    Mutant(
        "zeta's gradient in C++ without the value share",
        "fast/cpp/delta_rows.cpp",
        "in.grad_erased[slot] = in.value_share[row] * grad_share;",
        "in.grad_erased[slot] = grad_share;",
        "tests/model/test_native.py",
    ),
    Mutant(
        "memories in C++ that go on in the next document",
        "fast/cpp/delta_rows.cpp",
        "return !in.continues || in.continues[block * in.rows + row];",
        "return true;",
        "tests/model/test_equivalence.py",
    ),
    Mutant(
        "the value gate up to 1, not 2",
        "model/memory_mixer.py",
        "value_norm = 2 * value_logits.sigmoid()",
        "value_norm = value_logits.sigmoid()",
        "tests/model/test_equivalence.py",
    ),
    Mutant(
        "a norm without the erase gate",
        "model/memory_mixer.py",
        "value_norm = value_norm / erased",
        "value_norm = value_norm * 1.0",
        "tests/model/test_equivalence.py",
    ),
    Mutant(
        "padding writes and decays",
        "model/memory_mixer.py",
        "gate = torch.where(plan.valid[:, None], gate, 0.0)",
        "gate = gate + 0.0",
        "tests/model/test_equivalence.py",
    ),
    # spans, documents and positions
    Mutant(
        "a chunk's start that never moves on",
        "model/memory_scan.py",
        "elif chunk_start and span.closes:",
        "elif chunk_start and not span.closes:",
        "tests/model/test_equivalence.py",
    ),
    Mutant(
        "a document in a later span goes on with the one before",
        "model/memory_scan.py",
        "        state = restart(memories, state, span)\n    keys, values",
        "        state = restart(memories, state, span) if span.start == 0 else state\n    keys, values",
        "tests/model/test_equivalence.py",
    ),
    Mutant(
        "the convolution sees the document before",
        "model/layers.py",
        "earlier = earlier * span.inside[k]",
        "earlier = earlier + 0.0",
        "tests/model/test_equivalence.py",
    ),
    Mutant(
        "the convolution forgets one token too many",
        "model/chunks.py",
        "[position >= steps for steps in range(tail_size, 0, -1)]",
        "[position > steps for steps in range(tail_size, 0, -1)]",
        "tests/model/test_equivalence.py",
    ),
    Mutant(
        "chunks that count from the call, not from the text",
        "model/chunks.py",
        "closes = (seen + stop) % chunk == 0",
        "closes = stop % chunk == 0",
        "tests/model/test_equivalence.py",
    ),
    Mutant(
        "a row counts one token too few",
        "model/chunks.py",
        "seen_after = torch.where(last_column >= 0, last_position + 1, seen)",
        "seen_after = torch.where(last_column >= 0, last_position, seen)",
        "tests/model/test_equivalence.py",
    ),
    Mutant(
        "positions of documents count padding",
        "model/documents.py",
        "before = real.cumsum(1) - real.long()",
        "before = torch.ones_like(real).cumsum(1) - 1",
        "tests/model/test_inputs.py",
    ),
    Mutant(
        "a row's first token as a later document",
        "model/documents.py",
        "is_later = real & (real.cumsum(1) > 1)",
        "is_later = real & (real.cumsum(1) > 0)",
        "tests/model/test_inputs.py tests/model/test_generation.py",
    ),
    # attention
    Mutant(
        "a window one token wider",
        "model/window_plan.py",
        "farthest = position.clamp(max=window - 1)",
        "farthest = position.clamp(max=window)",
        "tests/model/test_equivalence.py",
    ),
    Mutant(
        "sinks one position further away",
        "model/window_plan.py",
        "position.clamp(max=WindowSizes.of(config).slots - 1)",
        "position.clamp(max=WindowSizes.of(config).slots)",
        "tests/model/test_equivalence.py",
    ),
    Mutant(
        "heads retain the tokens with the lowest scores",
        "model/retaining_reads.py",
        "scores.sort(dim=1, descending=True, stable=True)",
        "scores.sort(dim=1, descending=False, stable=True)",
        "tests/model/test_equivalence.py",
    ),
    Mutant(
        "a token is retained one block too long",
        "model/retaining_plan.py",
        "last_given_up=first + (2 * sizes.block - 1 - sizes.reach)",
        "last_given_up=first + (sizes.block - 1 - sizes.reach)",
        "tests/model/test_equivalence.py",
    ),
    Mutant(
        "the next document begins with what the last one retained",
        "model/retaining_reads.py",
        "torch.where(band.begins[:, None], -1, retained.positions)",
        "retained.positions",
        "tests/model/test_equivalence.py",
    ),
    Mutant(
        "rounding decides which of two equal words is retained",
        "model/retaining_attention.py",
        "return (scores / _SCORE_STEP).round() * _SCORE_STEP",
        "return scores",
        "tests/model/test_retaining_attention.py",
    ),
    Mutant(
        "interest of the mean token of a question",
        "retain/interest.py",
        "(highest_of_group * is_token[..., None]).amax((1, 2))",
        "(highest_of_group * is_token[..., None]).mean((1, 2))",
        "tests/retain/test_learned_scores.py",
    ),
    Mutant(
        "a compressed key that a query cannot have read",
        "model/sparse_branches.py",
        "is_complete = start + stride <= at + 1",
        "is_complete = start <= at + 1",
        "tests/model/test_equivalence.py",
    ),
    Mutant(
        "a band's gradient one key too far",
        "fast/window_reads.py",
        "learning = factors[:, :, first - start :]",
        "learning = factors[:, :, first - start :].roll(1, 2)",
        "tests/model/test_window_attention.py",
    ),
    # levels
    Mutant(
        "a drift of twice the bound",
        "model/level_learning.py",
        "factor = (learning.drift * norm / drift",
        "factor = (2 * learning.drift * norm / drift",
        "tests/model/test_level_learning.py",
    ),
    Mutant(
        "a step along the gradient, not against it",
        "model/level_learning.py",
        "moved = torch.addcmul(delta, even, size, value=-1, out=even)",
        "moved = torch.addcmul(delta, even, size, value=1, out=even)",
        "tests/model/test_level_learning.py",
    ),
    Mutant(
        "the gate opens above a uniform guess",
        "model/level_learning.py",
        "gated = mean > guess if learning.gate",
        "gated = mean < guess if learning.gate",
        "tests/model/test_level_learning.py",
    ),
    Mutant(
        "a piece learns its last token's target",
        "model/level_learning.py",
        "piece.targets, slice(-1))",
        "piece.targets, slice(None))",
        "tests/model/test_level_learning.py",
    ),
    Mutant(
        "levels side by side without their weights",
        "model/continuum.py",
        "total = total + weight * output",
        "total = total + output",
        "tests/model/test_training_features.py",
    ),
    Mutant(
        "a slow level steps along the sum",
        "optim/level_clock.py",
        'return state["gradient_sum"].div_(period).to(parameter.dtype)',
        'return state["gradient_sum"].to(parameter.dtype)',
        "tests/optim/test_level_clock.py",
    ),
    Mutant(
        "a period that ends without a step",
        "optim/level_clock.py",
        "return min(now - 1, round(calls * now / before))",
        "return round(calls * now / before)",
        "tests/optim tests/training/test_continue.py",
    ),
    # the loss
    Mutant(
        "labels shifted the other way",
        "model/loss.py",
        "return F.pad(labels[..., 1:], (0, 1), value=IGNORED)",
        "return F.pad(labels[..., :-1], (1, 0), value=IGNORED)",
        "tests/model/test_loss.py",
    ),
    Mutant(
        "a mean over the batch's own tokens",
        "model/loss.py",
        "if count is None:\n            count = (shift_labels != IGNORED).sum()",
        "if True:\n            count = (shift_labels != IGNORED).sum()",
        "tests/model/test_loss.py",
    ),
    Mutant(
        "softmax without its one-hot",
        "model/loss.py",
        "grad_logits = shares.scatter_add_(-1, targets, minus_one)",
        "grad_logits = shares + 0.0",
        "tests/model/test_loss.py",
    ),
    # data
    Mutant(
        "the first document's boundary is lost",
        "data/packing.py",
        "begins[row, block.starts] = True",
        "begins[row, block.starts[1:]] = True",
        "tests/data/test_packing.py",
    ),
    Mutant(
        "tokens that are not learned are predicted",
        "data/packing.py",
        "labels[row, : len(block.tokens)] = torch.where(predicted, block.tokens, IGNORED)",
        "labels[row, : len(block.tokens)] = torch.where(predicted, block.tokens, ~block.tokens)",
        "tests/data/test_chats.py",
    ),
    Mutant(
        "a resume one row late",
        "data/loader.py",
        'self._rows = 0 if state is None else state["rows"]',
        'self._rows = 0 if state is None else state["rows"] + 1',
        "tests/data/test_loader.py",
    ),
    Mutant(
        "the second epoch begins where the first one did",
        "data/order.py",
        "before = epoch * self.shares[corpus]",
        "before = 0 * self.shares[corpus]",
        "tests/data/test_order.py",
    ),
    # the run
    Mutant(
        "rotation keeps one checkpoint more",
        "training/checkpoints/manifest.py",
        "if complete <= save_total_limit:",
        "if complete <= save_total_limit + 1:",
        "tests/training/checkpoints/test_manifest.py",
    ),
    Mutant(
        "a warm-up that jumps to its peak",
        "training/schedule.py",
        "share = self.first + (1 - self.first) * share",
        "pass",
        "tests/training/test_continue.py tests/training/test_parsing.py",
    ),
    Mutant(
        "the plan forgets gradients",
        "plan/memory.py",
        "before += block.gradients[-1]",
        "pass",
        "tests/plan/test_memory.py",
    ),
    Mutant(
        "parts of a model cut too small",
        "plan/shapes.py",
        "count = count // rows * largest_part(rows, parts)",
        "count = count // rows * (rows // parts)",
        "tests/plan/test_memory.py",
    ),
    # evaluation and conversion
    Mutant(
        "windows of an evaluation one token off",
        "evaluation/streams.py",
        "rows.append(input_ids[start : start + window])",
        "rows.append(input_ids[start : start + window - 1])",
        "tests/evaluation/test_streams.py",
    ),
    Mutant(
        "a mixture without its bound",
        "frozen.py",
        "mixed = math.log(len(totals)) - (-totals).logsumexp(0)",
        "mixed = -(-totals).logsumexp(0)",
        "tests/test_frozen_memories.py tests/evaluation/test_perplexity.py",
    ),
    Mutant(
        "a memory file of another model",
        "model/cache_file.py",
        "            return self.exact == other.exact",
        "            return True",
        "tests/model/test_cache_file.py",
    ),
    Mutant(
        "a memory file of a model that retains other tokens",
        "model/cache_file.py",
        "in chain(module._parameters.items(), module._buffers.items()):",
        "in module._parameters.items():",
        "tests/model/test_fingerprint.py",
    ),
]


def source(mutant: Mutant, root: Path = ROOT) -> Path:
    return root / "hope_hf" / mutant.file


def stands(mutant: Mutant) -> bool:
    """Whether the line is in its file, once."""
    return source(mutant).read_text(encoding="utf-8").count(mutant.line) == 1


def copy_of_tree(folder: Path) -> Path:
    """A copy of what the tests read."""
    copy = folder / "tree"
    ignored = shutil.ignore_patterns(".git", ".venv", "__pycache__", "runs", "build", ".*_cache")
    shutil.copytree(ROOT, copy, ignore=ignored)
    return copy


def first_failure(tree: Path, tests: list[str], minutes: int) -> str | None:
    """The first test that fails in the tree, "time" after so many minutes; None if all pass."""
    # before what is there: a test may need a library of a folder of its own
    path = os.pathsep.join(filter(None, (str(tree), os.environ.get("PYTHONPATH"))))
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--no-header", *tests]
    try:
        done = subprocess.run(
            command, cwd=tree, env=environment, capture_output=True, text=True, timeout=60 * minutes, check=False
        )
    except subprocess.TimeoutExpired:
        return "time"
    for line in done.stdout.splitlines():
        if line.startswith(("FAILED", "ERROR")):
            return line.split(" - ")[0].split(" ", 1)[1]
    if done.returncode:
        raise SystemExit(f"pytest ended with status {done.returncode}:\n{done.stdout}{done.stderr}")
    return None


def main() -> int:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("words", nargs="*", help="try only mutants whose name holds one of these")
    parser.add_argument("--list", action="store_true", help="list them and try none")
    parser.add_argument("--whole", action="store_true", help="run the default suite where the named tests pass")
    parser.add_argument("--minutes", type=int, default=5, help="limit of each run of tests")
    options = parser.parse_args()
    chosen = [one for one in MUTANTS if not options.words or any(word in one.name for word in options.words)]
    moved = [one for one in chosen if not stands(one)]
    for one in moved:
        print(f"moved: {one.name}: {one.file} has not exactly one line {one.line!r}")
    if options.list:
        for one in chosen:
            print(f"{one.name}: {one.file}: {one.line}")
    if options.list or moved:
        return int(bool(moved))
    missed = []
    with tempfile.TemporaryDirectory() as folder:
        tree = copy_of_tree(Path(folder))
        for one in chosen:
            file = source(one, tree)
            whole = file.read_text(encoding="utf-8")
            file.write_text(whole.replace(one.line, one.broken), encoding="utf-8")
            found = first_failure(tree, one.tests.split(), options.minutes)
            if found is None and options.whole:
                found = first_failure(tree, [], 60)
            file.write_text(whole, encoding="utf-8")
            if found not in (None, "time") and first_failure(tree, [found], options.minutes):
                raise SystemExit(f"{found} fails without a mutant, too: it catches nothing.")
            missed += [one.name] * (found in (None, "time"))
            print(f"| {one.name} | {found or 'not caught'} |", flush=True)
    print(f"{len(chosen) - len(missed)} of {len(chosen)} are caught")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
