"""Parsing a chat model's text into content, reasoning and tool calls."""
