"""Published benchmarks with lm-eval: its tasks, prompts, requests to the model and metrics."""

import logging
import math
import os
import sys
import warnings
from collections.abc import Callable
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from functools import partial

import torch.distributed as dist

from hope_hf.common.process import is_first_process
from hope_hf.common.program import LogLines
from hope_hf.common.progress import show_progress

from .flags import AUTO, Arguments
from .harness_model import harness_model
from .harness_tasks import LOCAL, find_tasks, paper_row, without_foreign_code
from .result import CannotRun, Row, SuiteResult, summary_row
from .subject import Subject

# lm-eval finds a batch size with rows as long as the model's longest input.
LONGEST_TRIED = 16_384
# lm-eval's metrics that count documents whose right choice is the likeliest.
OF_CHOICES = ("acc", "acc_norm", "acc_bytes", "acc_mutual_info")


def zero_shot(args: Arguments, subject: Subject) -> SuiteResult:
    """The tasks of `--tasks`: a row per metric, with lm-eval's standard error and the number of documents, and the
    paper's row if its tasks are among them.

    The numbers equal those of lm-eval's command on the same model (`lm_eval --model hf`) with its own seeds, except
    where `harness_model` says why not. Several
    processes share the requests; only the first returns rows. Raises ValueError for tasks and data that cannot be
    used.
    """
    import lm_eval

    # The name: lm-eval loads its own tokenizer, since it changes it.
    tokenizer = args.tokenizer_name or args.model_name_or_path
    _check_length(args, subject)
    with _own_output(), without_foreign_code(args.trust_remote_code):
        manager, tasks = find_tasks(args)
        model = harness_model(
            subject,
            tokenizer=tokenizer,
            batch_size=AUTO if args.batch_size == AUTO else args.rows,
            max_length=args.max_length,
            trust_remote_code=args.trust_remote_code,
        )
        if dist.is_initialized():
            for kind in ("loglikelihood", "loglikelihood_rolling", "generate_until"):
                setattr(model, kind, partial(answer_together, getattr(model, kind)))
        try:
            results = lm_eval.simple_evaluate(
                model=model,
                tasks=tasks,
                num_fewshot=args.num_fewshot,
                limit=args.limit,
                task_manager=manager,
                log_samples=args.log_samples,
                # Every process has all answers; only the first draws the 100,000 bootstrap samples for the errors.
                **({} if is_first_process() else {"bootstrap_iters": 0}),
            )
        except Exception as error:
            # The message of Python's random.sample.
            if "larger than population" in str(error):
                raise ValueError(
                    f"--num_fewshot {args.num_fewshot} is more than the examples that a task has: lower it."
                ) from None
            raise
    if not is_first_process():
        return SuiteResult()
    table = rows(results)
    shots_of_tasks = {row["task"]: row["num_fewshot"] for row in table}
    for task, shots in shots_of_tasks.items():
        if None not in (args.num_fewshot, shots) and shots != args.num_fewshot:
            warnings.warn(f"--num_fewshot has no effect on {task}: lm-eval defines it for {shots}.", stacklevel=2)
    for row in table:
        is_of_choices = row["metric"] in OF_CHOICES
        row["chance"] = manager.chances.get(row["task"]) if is_of_choices else None
    tables = {f"lm-eval {lm_eval.__version__}": table}
    row_of_paper = paper_row(table)
    if row_of_paper:
        tables["The paper's row, accuracies in percent"] = [row_of_paper]
    logs = {}
    for task, documents in results.get("samples", {}).items():
        logs[f"samples_{task}"] = documents
    shown = []
    for row in table:
        name = f"{row['task']}, {row['metric']}"
        shown.append(summary_row(name, row["value"], row["value_stderr"], row["chance"]))
    return SuiteResult(tables, logs=logs, summary=shown)


def answer_together(answer: Callable[[list], list], requests: list) -> list:
    """`answer(requests)`: every process computes a part, and all processes get all answers, in order.

    lm-eval's requests with the same first argument (the context) go to one process, which reads it once.
    """
    processes = dist.get_world_size()
    owner_of_context = {}
    owners = []
    for request in requests:
        context = request.args[0]
        next_owner = len(owner_of_context) % processes
        owners.append(owner_of_context.setdefault(context, next_owner))
    rank = dist.get_rank()
    mine = [request for request, owner in zip(requests, owners, strict=True) if owner == rank]
    parts = [None] * processes
    dist.all_gather_object(parts, answer(mine) if mine else [])
    queues = list(map(iter, parts))
    return [next(queues[owner]) for owner in owners]


def _check_length(args: Arguments, subject: Subject):
    bound = subject.longest_input
    if None not in (args.max_length, bound) and args.max_length > bound:
        raise ValueError(
            f"--max_length {args.max_length:,} is more than the model's {bound:,} positions "
            "(max_position_embeddings): lower it."
        )
    longest = args.max_length or getattr(subject.model.config, "max_position_embeddings", 0)
    if args.batch_size == AUTO and longest > LONGEST_TRIED:
        raise ValueError(
            f"--batch_size auto tries rows of up to {longest:,} tokens: give --max_length (at most "
            f"{LONGEST_TRIED:,}) as well, or a number."
        )


def rows(results: dict) -> list[Row]:
    """lm-eval's results as rows. Raises ValueError for a value that is not finite."""
    result = []
    for task, scores in results["results"].items():
        if task.startswith(LOCAL):
            continue
        for key, value in scores.items():
            metric, comma, answers = key.partition(",")
            if not comma or metric.endswith("_stderr"):
                continue
            stderr = scores.get(f"{metric}_stderr,{answers}")
            if not math.isfinite(value):
                raise CannotRun(f"zero_shot: {metric} of {task} is {value}: check the model's weights or --dtype.")
            result.append(
                {
                    "task": task,
                    "version": str(results["versions"][task]),
                    "num_fewshot": results["n-shot"].get(task),
                    # lm-eval's filter of the answers, if there is one
                    "metric": metric if answers == "none" else key,
                    "value": float(value),
                    "value_stderr": float(stderr) if isinstance(stderr, float) else None,
                    "n": scores["sample_len"],
                }
            )
    return result


@contextmanager
def _own_output():
    """Show lm-eval's bars and notes on a terminal; a log gets a bar's line now and then. Warnings take one line.

    Only the first process shows them.
    """
    shown = is_first_process() and show_progress()
    sentences = logging.StreamHandler(sys.stderr) if is_first_process() else logging.NullHandler()
    sentences.setFormatter(logging.Formatter("warning: lm-eval: %(message)s"))
    # Warnings of constructors concern their defaults, which are intended.
    sentences.addFilter(lambda record: record.levelno >= logging.WARNING and record.funcName != "__init__")
    logger = logging.getLogger("lm_eval")
    logger.addHandler(sentences)
    try:
        with open(os.devnull, "w") as nowhere:
            notes = sys.stderr if shown else nowhere
            bars = notes if shown or not is_first_process() else LogLines("%|")
            with redirect_stdout(notes), redirect_stderr(bars):
                yield
    finally:
        logger.removeHandler(sentences)
