"""Our metrics as objects of the package `evaluate`: its own ones are code that it would fetch from the Hub."""

import tempfile

import torch


def next_token_accuracy():
    """An `evaluate.Metric` over token ids: `{"accuracy": share of predictions that equal their references}`.

    `add_batch(predictions=..., references=...)` with int64 [n] as often as needed, then `compute()`; or both at once.
    transformers' `run_clm.py` calls this `eval_accuracy`.
    """
    # Slow to import.
    import evaluate
    from datasets import Features, Value

    class NextTokenAccuracy(evaluate.Metric):
        def _info(self):
            return evaluate.MetricInfo(
                description="Share of tokens that the model ranks first.",
                citation="",
                features=Features({"predictions": Value("int64"), "references": Value("int64")}),
            )

        def _compute(self, predictions, references):
            return {"accuracy": float((torch.as_tensor(predictions) == torch.as_tensor(references)).double().mean())}

    # A file in the cache would be shared with other processes. `evaluate` makes its folder all the same, which may be
    # one that cannot be written.
    with tempfile.TemporaryDirectory() as folder:
        return NextTokenAccuracy(keep_in_memory=True, cache_dir=folder)
