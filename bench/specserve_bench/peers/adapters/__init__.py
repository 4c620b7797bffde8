"""One engine each, behind the same messages. Runs in that engine's own environment."""
