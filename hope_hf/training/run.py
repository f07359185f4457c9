"""The command line's entry: errors of the user become one sentence and an exit status."""

from hope_hf.cli.process import complain, warn_in_sentences

from .parsing import parse


def main(argv: list[str]) -> int:
    """Parse `argv` and train. Returns 0, or 2 after a mistake of the user, or 1 where training diverged.

    A ValueError is one sentence for the user; any other exception is ours or the machine's and keeps its traceback.
    """
    warn_in_sentences()
    try:
        args = parse(argv)
        # Not at the top: --help and misspelled flags answer before models and data sets are imported.
        from .launch import OneSidedError
        from .trainer import TrainingDiverged, train
    except ValueError as error:
        return complain(error, 2)
    try:
        return train(args)
    except TrainingDiverged as error:
        return complain(error, 1)
    except ValueError as error:
        return complain(error, 2, everywhere=isinstance(error, OneSidedError))
