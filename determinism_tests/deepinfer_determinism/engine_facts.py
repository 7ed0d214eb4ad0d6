"""Names of what a child reports about its engine's configuration; loads nothing."""

CONCURRENT_BATCHES = "batches that the scheduler plans ahead"
CAPTURED_SIZES = "captured graph sizes"
RANKS = "ranks that share the model"
