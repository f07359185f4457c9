"""How a run gets its first weights when no process holds the whole model (`--init sharded`)."""
