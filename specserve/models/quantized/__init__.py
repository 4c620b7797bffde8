"""Checkpoints whose linear maps are integers or 8-bit floats, in the formats of other tools."""
