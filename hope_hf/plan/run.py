"""Entry of the command line: parse, count, simulate, answer."""

import json

from hope_hf.cli.models import is_hope
from hope_hf.cli.process import complain, one_line
from hope_hf.cli.program import program

from .parsing import Question, parse


@program
def main(argv: list[str]) -> int:
    """Print the plan. Returns 0, or 2 after a mistake of the user, a batch that fits nowhere included.

    A ValueError is one sentence for the user; any other exception is a bug and keeps its traceback.
    """
    try:
        _answer(parse(argv))
    except ValueError as error:
        return complain(error, 2)
    return 0


def _answer(question: Question) -> None:
    # Not at the top: misspelled flags answer before the simulation's parts are imported.
    from .plot import draw
    from .report import as_json, as_text
    from .simulate import Simulation, can_simulate, simulate
    from .verdict import require_a_fit, settings, verdict

    rows = settings(question)
    verdicts = [verdict(question, rows, gpu, None) for gpu in question.gpus]
    require_a_fit(question, rows, verdicts)
    found = can_simulate(question.launch)
    if not question.args.simulate:
        found = "--no_simulate is given"
    if found is None:
        try:
            found = simulate(question.config, question.launch, question.step)
        except Exception as error:
            if is_hope(question.config):
                raise
            # Operators of other architectures may need the numbers that fake tensors lack.
            found = f"{question.config.model_type} does not run on fake tensors ({one_line(error)})"
    if isinstance(found, Simulation):
        verdicts = [verdict(question, rows, gpu, found) for gpu in question.gpus]
    if question.args.plot:
        draw(rows, verdicts, question.args.plot)
    if question.args.json:
        print(json.dumps(as_json(question, rows, verdicts, found), indent=1))
    else:
        print(as_text(question, rows, verdicts, found))
