"""Speed of the engine with our model, beside vLLM's own model on the same host."""
