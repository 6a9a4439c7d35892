"""Looks at every host before anything is launched."""
