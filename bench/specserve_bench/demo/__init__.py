"""How the demo pair is trained, from Python's standard library, and how it is evaluated."""
