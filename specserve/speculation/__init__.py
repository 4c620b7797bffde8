"""Which draft tokens are proposed and verified: sources, draft models, heads, and their control."""
