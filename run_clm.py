"""Train a causal language model, HOPE unless another is named.

    python run_clm.py --output_dir runs/demo
    python run_clm.py recipe.yaml --learning_rate 1e-3

Without further flags: a HOPE of 8 M parameters on the built-in corpus, about five minutes on two cores.
`--help` lists all flags; a YAML file of the same keys may come first.
"""

import sys

from hope_hf.training import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
