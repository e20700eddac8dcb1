"""Models whose experts run on ttnn_moe."""
