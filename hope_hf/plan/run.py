"""Plans a command line, or a run that has started (`hope-hf train --dry_run`)."""

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from transformers import PreTrainedModel

from hope_hf.common.models import is_hope
from hope_hf.common.process import one_line
from hope_hf.common.program import printed

from .launch import Launch, StepOptions
from .memory import memory
from .parsing import Question
from .parts import estimated_parts
from .shapes import shapes_of

if TYPE_CHECKING:
    from .simulate import Simulation


# An estimate may be several times too small: scans keep more than the matrices around them read and write.
FAR_BELOW = 8


@dataclass(frozen=True)
class Planned:
    """Bytes of a run that has started.

    Attributes:
        peak: on the device of the process with the largest part.
        is_estimate: whether its activations are only estimated, as beside frozen weights, which keep fewer of them.
        weights, optimizer: of the whole model, weights in fp32.
        offloaded: in the memory of one machine, by all its processes.
        is_shared_out: whether each process holds only a part of the model.
        saved: weights in a checkpoint, that of a LoRA alone where one is trained.
        whole_gradients: of one process between accumulated batches, without `--sync_each_batch`.
    """

    peak: int
    is_estimate: bool
    weights: int
    optimizer: int
    offloaded: int
    is_shared_out: bool
    whole_gradients: int
    saved: int


def plan_running(
    model: PreTrainedModel, launch: Launch, step: StepOptions, per_node: int, room: float = 0
) -> Planned:
    """The plan of a run's model under the launch of its engine, with `per_node` processes on this machine.

    `room`: bytes. Where an estimate is far below them it is the answer, since tracing takes a second or two.
    """
    config = model.config
    whole = shapes_of(config, step.trust_remote_code)
    shapes = whole.as_trained(model)
    step = replace(step, checkpointing=launch.recomputes(step.checkpointing))
    estimated = estimated_parts(config, shapes, launch, step)
    process = memory(config, shapes, launch, step, per_node, estimated)
    if process.peak > room / FAR_BELOW:
        process = memory(config, shapes, launch, step, per_node)
    of_lora = shapes.count - whole.count
    return Planned(
        peak=process.peak,
        is_estimate=process.is_estimate or shapes.trained < shapes.count,
        weights=4 * shapes.count,
        optimizer=shapes.optimizer_bytes(step.optimizer, step.tokens(launch.world_size)),
        offloaded=process.host,
        is_shared_out=bool(launch.strategy.shared),
        whole_gradients=process.between_batches,
        saved=4 * (of_lora or whole.count),
    )


def answer(question: Question) -> int:
    """Print the plan; returns 0, or 1 if it cannot be printed. ValueError for a batch that fits nowhere."""
    from .report import Plan, as_json, as_text, draw
    from .verdict import require_a_fit, settings, verdict

    rows = settings(question)
    verdicts = [verdict(question, rows, gpu, None) for gpu in question.gpus]
    require_a_fit(question, rows, verdicts)
    simulation, reason = _simulated(question)
    if simulation is not None:
        verdicts = [verdict(question, rows, gpu, simulation) for gpu in question.gpus]
    plan = Plan(question, rows, verdicts, simulation, reason)
    if question.args.plot:
        draw(plan, question.args.plot)
    if question.args.json:
        print(json.dumps(as_json(plan), indent=1))
    else:
        print(as_text(plan))
    return printed()


def _simulated(question: Question) -> tuple["Simulation | None", str | None]:
    """The simulated step that `--simulate` asks for, or None and the reason why there is none."""
    if not question.args.simulate:
        return None, None
    from .simulate import can_simulate, simulate

    reason = can_simulate(question.config, question.launch)
    if reason is not None:
        return None, reason
    try:
        return simulate(question.config, question.launch, question.step), None
    except Exception as error:
        if is_hope(question.config):
            raise
        # Operators of other architectures may read numbers, which fake tensors lack.
        return None, f"{question.config.model_type} does not run on fake tensors ({one_line(error)})"
