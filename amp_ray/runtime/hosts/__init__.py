"""Hosts behind SSH or this machine, and the agent that runs trials on each."""
