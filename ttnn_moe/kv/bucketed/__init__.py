"""A KV cache whose tokens lie in tiers of 2, 3, 4, 8 and 16 bits: storage, quantisation and attention.

| module | holds |
|---|---|
| storage | a tier's tensors: made, written, read |
| packing | levels to bytes and back, in the order of tensor-core fragments |
| quantise | scales and levels; the Hadamard rotation |
| reference | attention to tiers in plain torch |
"""
