"""What the HTTP and the engine process exchange: plain data, without torch or transformers."""
