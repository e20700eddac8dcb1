"""Generation with any language model and any KV cache: requests, a scheduler, runners of steps, sampling."""
