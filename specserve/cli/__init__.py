"""The `specserve` command: serve, generate, chat, config, quantize, and a client of servers."""
