"""Every side effect of the package, and only that."""
