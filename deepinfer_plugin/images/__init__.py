"""Images: limits, decoding, preprocessing and vLLM's processor. The tower itself is ``model/vision.py``."""
