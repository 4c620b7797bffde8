"""Texts that have to obey a grammar: what a caller asks for, and which tokens may come next."""
