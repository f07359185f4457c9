"""Randomly generated tasks, and the small models that are trained and tested on them."""
