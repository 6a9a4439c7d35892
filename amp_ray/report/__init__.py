"""Tables and views for people."""
