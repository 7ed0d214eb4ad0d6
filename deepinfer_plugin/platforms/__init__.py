"""Which machine this is, and the platform classes vLLM is given."""
