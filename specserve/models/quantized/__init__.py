"""Reads checkpoints with linear maps in integers or 8-bit floats, in the formats of other tools."""
