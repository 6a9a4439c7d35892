"""By which program: its traits and its optimizers."""
