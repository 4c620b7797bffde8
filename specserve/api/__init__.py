"""Python callers: `LLM`, `AsyncLLM`, their outputs, and vLLM's names of arguments."""
