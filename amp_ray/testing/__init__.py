"""Test hosts, shipped so that users can try the package on a cluster that they do not have."""
