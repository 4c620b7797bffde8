"""Reads models in GGUF, llama.cpp's format for weights, config, tokenizer and chat template."""
