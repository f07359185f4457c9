"""CPU time of one training step of HOPE relative to a Llama of the same size, in one interleaved run.

python benchmarks/step.py [--lengths 512 2048] [--rounds 5]
"""

import argparse
import statistics
import time

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from hope_hf import HopeConfig

WIDTH, LAYERS = 256, 4


def build_models(vocab_size: int, max_length: int) -> dict[str, torch.nn.Module]:
    """HOPE and Llama of width 256 and 4 layers with equal parameters, up to 4 units of an MLP."""
    shared = {"vocab_size": vocab_size, "hidden_size": WIDTH, "num_hidden_layers": LAYERS}
    hope = AutoModelForCausalLM.from_config(HopeConfig(**shared))

    def llama(intermediate_size: int) -> torch.nn.Module:
        config = LlamaConfig(
            **shared,
            num_attention_heads=4,
            intermediate_size=intermediate_size,
            max_position_embeddings=max_length,
            attn_implementation="sdpa",
        )
        return AutoModelForCausalLM.from_config(config)

    missing = hope.num_parameters() - llama(8).num_parameters()
    return {"llama": llama(8 + 8 * round(missing / (3 * WIDTH * LAYERS) / 8)), "hope": hope}


def step_cpu_seconds(model: torch.nn.Module, input_ids: torch.Tensor) -> float:
    """Process CPU seconds of forward and backward, all threads together."""
    start = time.process_time()
    model(input_ids=input_ids, labels=input_ids).loss.backward()
    model.zero_grad()
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048], help="tokens of a sequence")
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds after one to warm up")
    parser.add_argument("--batch_size", type=int, default=2)
    parser.add_argument("--vocab_size", type=int, default=8192)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.set_flush_denormal(True)
    torch.manual_seed(0)
    models = build_models(options.vocab_size, max(options.lengths))
    for name, model in models.items():
        print(f"{name}: {model.num_parameters():,} parameters")
    for length in options.lengths:
        input_ids = torch.randint(options.vocab_size, (options.batch_size, length))
        times = {name: [] for name in models}
        for _ in range(options.rounds + 1):
            for name, model in models.items():
                times[name].append(step_cpu_seconds(model, input_ids))
        ratios = [hope / llama for hope, llama in zip(times["hope"][1:], times["llama"][1:], strict=True)]
        seconds = {name: statistics.median(values[1:]) for name, values in times.items()}
        print(
            f"T={length}: llama {seconds['llama']:.3f} s, hope {seconds['hope']:.3f} s of CPU time a step; "
            f"ratio {statistics.median(ratios):.2f} (of {len(ratios)} rounds: {min(ratios):.2f} to {max(ratios):.2f})"
        )


if __name__ == "__main__":
    main()
