"""Between text and tokens: tokenizer, chat templates, formats of answers, grammars. No torch."""
