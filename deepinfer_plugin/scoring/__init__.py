"""Log-probabilities of given token sequences, taken through the engine and stored resumably."""
