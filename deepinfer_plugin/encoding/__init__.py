"""From text to tokens, and what the model derives from the tokenizer."""
