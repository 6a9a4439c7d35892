"""What it is trained on: devices, nodes and links."""
