"""Measures specserve through its command and Python API, and trains the demo pair."""
