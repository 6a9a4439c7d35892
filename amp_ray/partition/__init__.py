"""Cut a chain of layers into stages: the partition problem and its exact solver.

This package knows arrays, not devices. Planners fill `StageTables` and `OptionTable`.
"""
