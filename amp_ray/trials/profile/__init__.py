"""Profiles: points to measure, records of measurements, and tables made from them."""
