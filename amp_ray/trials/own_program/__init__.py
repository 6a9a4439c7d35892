"""The user's own training program: placeholders, generated files, metrics from its logs."""
