"""Runtime ``torch``: executes the instruction lists of any strategy by ``torch.distributed``."""
