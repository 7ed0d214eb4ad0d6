"""What the plugin adds to vLLM's sampler."""
