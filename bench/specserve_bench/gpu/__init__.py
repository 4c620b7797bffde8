"""`make gpu-check`: tests and measurements of the GPU build that need a GPU."""
