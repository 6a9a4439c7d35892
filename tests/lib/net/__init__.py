"""The net: recorded answers of the package to many commands, which show every change of an answer.

It uses only the public surface: the command line, files, and `import amp_ray`.
"""
