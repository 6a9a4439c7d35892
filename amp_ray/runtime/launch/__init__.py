"""One trial on some hosts: from commands to an outcome."""
