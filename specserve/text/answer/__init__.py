"""What a chat model's text consists of: content, reasoning and tool calls."""
