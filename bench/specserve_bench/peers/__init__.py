"""specserve beside other engines, on one checkpoint, in one run."""
