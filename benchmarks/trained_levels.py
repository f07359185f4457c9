"""Does training through what levels learn pay? Plain training, training through it, and what a step costs.

    python benchmarks/trained_levels.py --text FILE.txt ... --held_out FILE.txt --out REPORT.json
    python benchmarks/trained_levels.py --cost

Every text is one stream of tokens of a byte-level BPE that is trained on the training texts. A run trains one model
with each of the ways and seeds, then reads the held-out text, in segments, with levels that do not learn and with
levels that learn at several factors of the rate. `--cost` times steps of training, interleaved, without a text.
"""

import argparse
import copy
import json
import math
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch
from tokenizers import ByteLevelBPETokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from hope_hf import HopeCache, HopeConfig, HopeForCausalLM, LevelLearning

# Arguments of the forward pass in training.
WAYS = {
    "plain": {},
    "first_order": dict(learn=True, use_cache=False),
}
# Of the trained rate; 0: levels that do not learn.
FACTORS = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
WEIGHT_DECAY, RATE_OF_VECTORS = 0.1, 4.0


def main(argv: list[str]) -> int:
    args = parse(argv)
    torch.manual_seed(args.seeds[0])
    if args.cost:
        print(cost(args))
        return 0
    tokens, held_out = encode(args)
    report = {"flags": vars(args) | {"out": None}, "device": device_name(args.device), "runs": []}
    for seed in args.seeds:
        for way in args.ways:
            begins = time.perf_counter()
            model, curve = train(args, way, seed, tokens)
            seconds = time.perf_counter() - begins
            losses = {}
            for factor in FACTORS:
                losses[factor] = read(args, model, held_out, factor)
            run = dict(way=way, seed=seed, seconds=seconds, curve=curve, rates=rates(model), losses=losses)
            report["runs"].append(run)
            told = ", ".join(f"x{factor:g} {mean:.4f}/{last:.4f}" for factor, (mean, last) in losses.items())
            print(f"{way} seed {seed}: {seconds:.0f} s, mean/last quarter {told}; rates {run['rates']}", flush=True)
            if args.out:
                Path(args.out).write_text(json.dumps(report, indent=1))
    return 0


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", nargs="+", default=[], help="training texts")
    parser.add_argument("--held_out", nargs="+", default=[], help="texts read after the training")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--block_size", type=int, default=2048)
    parser.add_argument("--period", type=int, default=256)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocab_size", type=int, default=1024)
    parser.add_argument("--clocks", type=int, nargs="+", default=[1], help="periods of the levels, in pieces")
    parser.add_argument("--learning_rate", type=float, default=3e-3)
    parser.add_argument("--rate", type=float, default=0.025, help="level_learning.rate at the start")
    parser.add_argument("--drift", type=float, default=0.3)
    parser.add_argument("--segments", type=int, default=8, help="segments of the held-out text, each read anew")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--cost", action="store_true", help="time steps of both ways")
    parser.add_argument("--out", help="report as JSON")
    return parser.parse_args(argv)


def device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads"


def new_model(args: argparse.Namespace, way: str) -> HopeForCausalLM:
    periods = [args.period * clock for clock in args.clocks]
    learning = LevelLearning(periods=periods, rate=args.rate, drift=args.drift, learned_rate=True)
    config = HopeConfig(
        vocab_size=args.vocab_size, hidden_size=args.width, num_hidden_layers=args.layers, level_learning=learning,
        level_periods=[1] * len(periods), tie_word_embeddings=True,
    )  # fmt: skip
    return HopeForCausalLM(config).to(args.device).train()


def encode(args: argparse.Namespace) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Tokens of the training texts, and segments of the held-out ones."""
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train(args.text, vocab_size=args.vocab_size, show_progress=False)

    def of(file: str) -> torch.Tensor:
        return torch.tensor(tokenizer.encode(Path(file).read_text(encoding="utf-8")).ids)

    texts = [of(file) for file in args.held_out]
    segments = [text[start : start + args.block_size] for text in texts for start in starts(len(text), args)]
    return torch.cat([of(file) for file in args.text]), segments


def starts(length: int, args: argparse.Namespace) -> list[int]:
    return [int(at * (length - args.block_size) / args.segments) for at in range(args.segments)]


def optimizer_of(args: argparse.Namespace, model: HopeForCausalLM) -> torch.optim.Optimizer:
    decays = [p for p in model.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim != 2]
    groups = [
        dict(params=decays, weight_decay=WEIGHT_DECAY, lr=args.learning_rate),
        dict(params=vectors, weight_decay=0.0, lr=args.learning_rate * RATE_OF_VECTORS),
    ]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95))


def train(args: argparse.Namespace, way: str, seed: int, tokens: torch.Tensor) -> tuple[HopeForCausalLM, list[float]]:
    """The trained model and its loss every tenth of the run; rows and their order depend on the seed alone."""
    torch.manual_seed(seed)
    model = new_model(args, way)
    optimizer = optimizer_of(args, model)
    warmup = max(1, args.steps // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min((step + 1) / warmup, 0.5 + 0.5 * math.cos(math.pi * min(1.0, step / args.steps))),
    )
    generator = torch.Generator().manual_seed(seed)
    curve, window = [], []
    for step in range(args.steps):
        begin = torch.randint(len(tokens) - args.block_size, (args.rows,), generator=generator)
        ids = torch.stack([tokens[start : start + args.block_size] for start in begin]).to(args.device)
        window.append(advance(model, optimizer, ids, way))
        schedule.step()
        if (step + 1) % max(1, args.steps // 10) == 0:
            curve.append(float(torch.stack(window).mean()))
            window = []
    return model, curve


def advance(model: HopeForCausalLM, optimizer, ids: torch.Tensor, way: str) -> torch.Tensor:
    """One step; its loss."""
    loss = model(ids, labels=ids, skip_logits=True, **WAYS[way]).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def read(args: argparse.Namespace, model: HopeForCausalLM, segments: list, factor: float) -> tuple[float, float]:
    """Mean loss of the segments, and that of their last quarters, with levels that learn at a factor of the rate."""
    model.eval()
    own = model.config.level_learning
    # the bound follows the rate, or it would hide a larger one
    model.config.level_learning = replace(own, rate=own.rate * factor, drift=own.drift * max(1.0, factor))
    batch = torch.stack(segments).to(args.device)
    losses = []
    with torch.no_grad():
        for part in batch.split(16):
            cache = HopeCache(model.config)
            logits = model(part, cache=cache, learn=True).logits[:, :-1].float()
            targets = part[:, 1:]
            losses.append(torch.nn.functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none"))
    model.config.level_learning = own
    losses = torch.cat(losses)
    return float(losses.mean()), float(losses[:, -(args.block_size // 4) :].mean())


def rates(model: HopeForCausalLM) -> list[float]:
    """Trained factors of the rate."""
    named = [parameter for name, parameter in model.named_parameters() if ".rates." in name]
    return [round(float(factor), 4) for one in named for factor in one.detach().exp()]


def cost(args: argparse.Namespace) -> str:
    """Seconds of a step of each way, interleaved, and their ratio to the plain one."""
    ids = torch.randint(args.vocab_size, (args.rows, args.block_size), device=args.device)
    plain = new_model(args, "plain")
    # all steps are taken, as in a trained model
    plain.config.level_learning = replace(plain.config.level_learning, gate=False)
    models = {way: copy.deepcopy(plain) for way in args.ways}
    optimizers = {way: optimizer_of(args, model) for way, model in models.items()}
    seconds = {way: [] for way in models}
    for turn in range(args.steps):
        for way, model in models.items():
            begins = time.perf_counter()
            advance(model, optimizers[way], ids, way)
            if args.device == "cuda":
                torch.cuda.synchronize()
            if turn:
                seconds[way].append(time.perf_counter() - begins)
    number = sum(p.numel() for p in plain.parameters()) / 1e6
    lines = [f"{number:.1f} M parameters, {args.rows} x {args.block_size} tokens, {device_name(args.device)}"]
    middle = {way: statistics.median(own) for way, own in seconds.items()}
    for way, own in middle.items():
        lines.append(f"{way}: {own:.3f} s a step, {own / next(iter(middle.values())):.2f} x {next(iter(middle))}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
