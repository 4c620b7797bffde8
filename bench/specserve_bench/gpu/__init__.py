"""`make gpu-check`: what has to be seen on a GPU before any of it is claimed."""
