"""Plans a command line, or a run that has started (`hope-hf train --dry_run`)."""

import json
from dataclasses import dataclass, replace

from transformers import PreTrainedModel

from hope_hf.common.models import is_hope
from hope_hf.common.process import one_line
from hope_hf.common.program import printed, program

from .launch import Launch, StepOptions
from .memory import memory
from .parsing import parse
from .shapes import shapes_of


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


def plan_running(model: PreTrainedModel, launch: Launch, step: StepOptions, per_node: int) -> Planned:
    """The plan of a run's model under the launch of its engine, with `per_node` processes on this machine."""
    config = model.config
    whole = shapes_of(config, step.trust_remote_code)
    shapes = whole.as_trained(model)
    step = replace(step, checkpointing=launch.recomputes(step.checkpointing))
    tokens = step.tokens(launch.world_size)
    optimizer = sum(weight.count * weight.optimizer_bytes(step.optimizer, tokens) for weight in shapes.weights)
    found = memory(config, shapes, launch, step, per_node)
    of_lora = shapes.count - whole.count
    return Planned(
        peak=found.peak,
        is_estimate=found.is_estimate or shapes.trained < shapes.count,
        weights=4 * shapes.count,
        optimizer=optimizer,
        offloaded=found.host,
        is_shared_out=bool(launch.strategy.shared),
        whole_gradients=found.between_batches,
        saved=4 * (of_lora or whole.count),
    )


@program
def main(argv: list[str]) -> int:
    """Print the plan. Returns 0, 1 if it cannot be printed, or 2 after a mistake or for a batch that fits nowhere."""
    question = parse(argv)
    # Imported here: a misspelled flag is refused before the simulation's parts are imported.
    from .report import as_json, as_text, draw
    from .simulate import Simulation, can_simulate, simulate
    from .verdict import require_a_fit, settings, verdict

    rows = settings(question)
    verdicts = [verdict(question, rows, gpu, None) for gpu in question.gpus]
    require_a_fit(question, rows, verdicts)
    found = can_simulate(question.config, question.launch) if question.args.simulate else "--no_simulate is given"
    if found is None:
        try:
            found = simulate(question.config, question.launch, question.step)
        except Exception as error:
            if is_hope(question.config):
                raise
            # Operators of other architectures may read numbers, which fake tensors lack.
            found = f"{question.config.model_type} does not run on fake tensors ({one_line(error)})"
    if isinstance(found, Simulation):
        verdicts = [verdict(question, rows, gpu, found) for gpu in question.gpus]
    if question.args.plot:
        draw(question, rows, verdicts, question.args.plot)
    if question.args.json:
        print(json.dumps(as_json(question, rows, verdicts, found), indent=1))
    else:
        print(as_text(question, rows, verdicts, found))
    return printed()
