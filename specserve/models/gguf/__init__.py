"""Models in GGUF, llama.cpp's format: weights, config, tokenizer and chat template in one file."""
