"""run_clm.py with the models of benchmarks/quality/peers.py registered: the same flags, the same trainer.

python benchmarks/quality/train.py --model_type llama_conv --output_dir runs/llama_conv
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import benchmarks.quality.peers  # noqa: F401  registers its models
from hope_hf.training import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
