"""Workers and the hooks of vLLM's model runner V2."""
