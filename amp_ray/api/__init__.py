"""The API of ``import amp_ray``: the commands as functions, and the types that they return."""
