"""The step loop and its parts."""
