"""`--level_learning sequence`: training through what levels learn from the pieces of a row (equations 70 to 74).

Every piece of a row is read with what the pieces before it have taught, and the loss runs over all of them: weights
are trained to be good starts for learning, and each matrix's rate is a parameter.
"""

from dataclasses import replace

from transformers import PreTrainedConfig, PreTrainedModel

from hope_hf import LevelLearning
from hope_hf.common.models import is_hope
from hope_hf.common.run_arguments import OptimizationArguments

from .engines.base import Engine

# Tokens of a piece, unless the flag or the model names another number.
PERIOD = 256


def set_learning(options: OptimizationArguments, config: PreTrainedConfig) -> None:
    """Write the flags into the config of the run's model; without `--level_learning` it stays.

    Raises ValueError with one sentence for a model without levels, or another number of levels.
    """
    if options.level_learning == "none":
        return
    if not is_hope(config):
        raise ValueError(f"--level_learning trains the levels of a HOPE, and this is a {config.model_type}.")
    learning = config.level_learning or LevelLearning()
    periods = learning.periods
    if options.level_learning_period is not None or periods is None:
        periods = [options.level_learning_period or PERIOD] * len(config.level_periods)
    config.level_learning = replace(learning, periods=periods, learned_rate=True)
    config.level_learning.check(config)


def check_learning(
    config: PreTrainedConfig, block_size: int, document_boundary: str, torch_compile: bool, engine: Engine
) -> None:
    """ValueError with one sentence if the run cannot train through what levels learn."""
    period = config.level_learning.periods[0]
    if block_size < 2 * period:
        raise ValueError(
            f"--level_learning sequence reads rows in pieces of {period} tokens and --block_size is {block_size}: "
            "give rows of two pieces or more, or a smaller --level_learning_period."
        )
    if document_boundary == "carry":
        raise ValueError("--level_learning sequence begins every row anew: use --document_boundary reset.")
    if torch_compile:
        raise ValueError("--level_learning sequence goes back through every piece twice: leave --torch_compile out.")
    if "mask" in config.needs and config.keeps_state:
        raise ValueError(
            "--level_learning sequence does not keep the documents of a row apart in a model with 'full_attention' "
            "and other layers: choose one kind of them (layer_types)."
        )
    if not engine.trains_levels:
        raise ValueError(
            f"--level_learning sequence runs in one process, DDP or FSDP2, and this launch is {engine.name}: take "
            "another launch file."
        )


def add_rates(model: PreTrainedModel, config: PreTrainedConfig) -> None:
    """Give a loaded model the learned rates that its own config did not ask for."""
    learning = getattr(config, "level_learning", None)
    if learning is None or not learning.learned_rate:
        return
    model.config.level_learning = learning
    for block in learning.resolved(config).blocks:
        for level in model.base_model.layers[block].continuum.levels:
            if level.rates is None:
                level.add_rates(learning.matrices)


def learning_inputs(level_learning: str) -> dict:
    """Arguments of every forward pass in training, by the value of `--level_learning`."""
    return {} if level_learning == "none" else {"learn": True}
