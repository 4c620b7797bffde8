"""Text processing without torch: tokenizer, chat templates, response formats, grammars."""
