"""Plan model-parallel training: search strategies, predict their cost, prove by real trials."""

__version__ = "0.1.0"

__all__ = ["__version__"]
