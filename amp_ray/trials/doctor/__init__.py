"""From the facts of hosts to findings, each with the command that mends it."""
