"""What the plugin changes in how vLLM plans steps."""
