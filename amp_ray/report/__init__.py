"""Tables and views that people read."""
