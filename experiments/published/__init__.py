"""How far the cost model is off on published measurements: loaders, metrics, figures."""
