"""Foreign files in and out: text of other planners' files to and from our values."""
