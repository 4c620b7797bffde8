"""Data and parameters for the HTTP and the engine process; imports no torch or transformers."""
