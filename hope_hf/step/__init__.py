"""One optimizer step: its flags, recipe, launch file, loss and recomputation; trainer and planner share them."""
