"""Hosts: SSH or this machine, the agent that runs on each, and what it may have left behind."""
