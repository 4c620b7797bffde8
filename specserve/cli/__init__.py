"""The `specserve` command: serve, generate, chat, config, quantize, and a chat client."""
