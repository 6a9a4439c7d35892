"""What is trained: a model is a chain of layers, a layer a run of operators."""
