"""Measures specserve from outside, the way a user meets it."""
