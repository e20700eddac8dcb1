"""Drawing tokens from logits on a GPU."""
