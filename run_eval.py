"""Evaluate a causal language model, HOPE or another of transformers.

    python run_eval.py --model_name_or_path runs/demo --suite perplexity,passkey,memory,sample --output_dir runs/eval
    python run_eval.py --model_name_or_path runs/demo --suite zero_shot --tasks piqa,arc_easy

`--help` lists all flags; a YAML file of the same keys may come first. The text is what run_clm.py held out with the
same data flags, or --validation_file. Exit status: 0, 1 if a suite could not run, 2 after a mistake in the flags.
"""

import sys

from hope_hf.evaluation import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
