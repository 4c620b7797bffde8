"""Compares specserve with other engines, on one checkpoint, in one run."""
