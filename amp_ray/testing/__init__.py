"""Fakes, contracts, oracles and test hosts, shipped so that users can test against them."""
