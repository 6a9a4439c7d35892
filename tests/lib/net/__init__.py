"""The net: what the package answers to many commands, recorded, so that a change of it shows.

It drives nothing but the public surface: the command line, files, and `import amp_ray`.
"""
