"""Models: a model is a chain of layers, a layer is a sequence of operators."""
