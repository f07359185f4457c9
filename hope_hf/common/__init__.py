"""What the programs share: flags, recipes, launch files, loading of models, messages to the user.

Trainer and planner also share their flags (`run_arguments`), the loss, recomputation and the tables of GPUs.
"""
