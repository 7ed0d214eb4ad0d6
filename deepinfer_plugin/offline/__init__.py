"""Answers to a file of prompts, through vLLM's offline engine, stored resumably."""
