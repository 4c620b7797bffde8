"""The HTTP side: an OpenAI-compatible server in front of an engine process."""
