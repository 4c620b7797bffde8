"""Structured outputs: requests for grammars, and the tokens that a grammar allows next."""
