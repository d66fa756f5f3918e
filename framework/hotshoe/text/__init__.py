"""Text on both sides of the engine: tokenizer, chat templates, detokenizer, stop strings."""
