"""Tasks that are drawn at random, and the small models that are trained and tested on them."""
