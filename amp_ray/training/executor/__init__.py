"""Runtime ``torch``: executes the instruction lists of any strategy with ``torch.distributed``."""
