"""Multi-query recall: 8 key-value pairs, then all keys in another order; measures the share of values predicted.

The control is the same model with frozen memories: it must stay at chance.

    python benchmarks/recall.py [--frozen] [--max_train_steps 1500]
"""

import argparse
import time

import torch

from hope_hf import HopeConfig, HopeForCausalLM
from hope_hf.evaluation.synthetic.associative_recall import IGNORED, recall_batch


@torch.no_grad()
def accuracy(model: HopeForCausalLM, input_ids: torch.Tensor, labels: torch.Tensor) -> float:
    """Share of the scored values that are the likeliest next token."""
    guesses = model(input_ids=input_ids, use_cache=False).logits[:, :-1].argmax(-1)
    scored = labels[:, 1:] != IGNORED
    return (guesses == labels[:, 1:])[scored].float().mean().item()


def train_recall(
    frozen: bool,
    steps: int,
    pairs: int = 8,
    symbols: int = 32,
    batch_size: int = 64,
    learning_rate: float = 3e-3,
    seed: int = 0,
    stop_at: float = 0.99,
    report_every: int = 100,
    **options,
) -> float:
    """Train a model of width 64 and 2 layers on fresh batches; the accuracy on 512 unseen rows.

    Stops early once a check on unseen rows reaches `stop_at`.
    """
    torch.manual_seed(seed)
    config = HopeConfig(
        vocab_size=2 * symbols,
        hidden_size=64,
        num_hidden_layers=2,
        **({"memory_learning_rate_max": 0.0} if frozen else {}),
        **options,
    )
    model = HopeForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.01)
    warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 50))
    generator = torch.Generator().manual_seed(seed)
    unseen = recall_batch(512, pairs, symbols, torch.Generator().manual_seed(1_000_000 + seed))
    start, reached = time.process_time(), 0.0
    for step in range(1, steps + 1):
        input_ids, labels = recall_batch(batch_size, pairs, symbols, generator)
        loss = model(input_ids=input_ids, labels=labels, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        warm_up.step()
        if step % report_every == 0 or step == steps:
            reached = accuracy(model, *unseen)
            print(
                f"step {step}: loss {loss:.3f}, accuracy {reached:.3f}, {time.process_time() - start:.0f} s",
                flush=True,
            )
            if reached >= stop_at:
                break
    return reached


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frozen", action="store_true", help="the control: memories stay at their initial state")
    parser.add_argument("--max_train_steps", type=int, default=1500)
    parser.add_argument("--learning_rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_flush_denormal(True)
    reached = train_recall(
        options.frozen, options.max_train_steps, learning_rate=options.learning_rate, seed=options.seed
    )
    kind = "frozen memories" if options.frozen else "HOPE"
    print(f"{kind}: {reached:.3f} of the values recalled (1 of 8 pairs at random: 0.125, any value: 0.031)")


if __name__ == "__main__":
    main()
