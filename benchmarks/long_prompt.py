"""Peak memory of `generate` over the length of the prompt, which is read in pieces by `prefill_chunk_size`.

python benchmarks/long_prompt.py [--lengths 2000 100000] [--preset tiny]

Each length runs in its own process. The ratio is the longest prompt's peak over the shortest's.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def measure(preset: str, length: int, prefill_chunk_size: int) -> dict:
    """Read a prompt of random tokens and generate 8 more, in this process."""
    sys.path.insert(0, str(ROOT))
    import torch

    from hope_hf import HopeConfig, HopeForCausalLM

    torch.manual_seed(0)
    torch.set_flush_denormal(True)
    model = HopeForCausalLM(HopeConfig.from_preset(preset)).eval()
    ids = torch.randint(model.config.vocab_size, (1, length))
    start = time.perf_counter()
    out = model.generate(
        ids, max_new_tokens=8, min_new_tokens=8, do_sample=False, prefill_chunk_size=prefill_chunk_size, pad_token_id=0
    )
    assert out.shape == (1, length + 8)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"tokens": length, "seconds": time.perf_counter() - start, "peak_mib": peak / 1024}


def measure_apart(preset: str, length: int, prefill_chunk_size: int) -> dict:
    """The same in a new process, whose peak is that of this prompt alone."""
    command = [sys.executable, __file__, "--preset", preset, "--lengths", str(length), "--here"]
    command += ["--prefill_chunk_size", str(prefill_chunk_size)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", nargs="+", type=int, default=[2_000, 100_000])
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--prefill_chunk_size", type=int, default=2048)
    parser.add_argument("--here", action="store_true", help="measure the first length in this process, print JSON")
    options = parser.parse_args()
    if options.here:
        print(json.dumps(measure(options.preset, options.lengths[0], options.prefill_chunk_size)))
        return
    rows = [measure_apart(options.preset, length, options.prefill_chunk_size) for length in sorted(options.lengths)]
    print("| prompt, tokens | seconds | peak, MiB |\n|---|---|---|")
    for row in rows:
        print(f"| {row['tokens']:,} | {row['seconds']:.1f} | {row['peak_mib']:,.0f} |")
    print(f"\nlongest over shortest: {rows[-1]['peak_mib'] / rows[0]['peak_mib']:.3f}")


if __name__ == "__main__":
    main()
