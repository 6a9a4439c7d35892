"""Profiles in the file formats of other planners, as profiles of ours."""
