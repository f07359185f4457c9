"""Our metrics as objects of the `evaluate` package, without a download from the Hub."""


def next_token_accuracy():
    """An `evaluate.Metric` over token ids: `{"accuracy": share of predictions that equal their references}`.

    `add_batch(predictions=[...], references=[...])` as often as needed, then `compute()`. `run_clm.py` of transformers
    calls this `eval_accuracy`. `evaluate` is imported here because the import takes seconds.
    """
    import datasets
    import evaluate

    class NextTokenAccuracy(evaluate.Metric):
        def _info(self):
            token = datasets.Value("int64")
            return evaluate.MetricInfo(
                description="Share of tokens that were the likeliest ones.",
                citation="",
                features=datasets.Features({"predictions": token, "references": token}),
            )

        def _compute(self, predictions, references):
            hits = sum(p == r for p, r in zip(predictions, references, strict=True))
            return {"accuracy": hits / len(references)}

    return NextTokenAccuracy()
