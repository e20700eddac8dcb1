"""What an expert computes between its two products, of gate and up in fp32.

| activation | computes |
|---|---|
| silu | silu(gate) * up, with silu(z) = z / (1 + exp(-z)) |
| clamped_swiglu | (up + 1) * gate * sigmoid(ALPHA * gate), gate cut to at most LIMIT, up to -LIMIT .. LIMIT |

Biases are added to gate and up first. Cutting keeps a NaN. clamped_swiglu is that of gpt-oss.
"""

from __future__ import annotations

SILU, CLAMPED_SWIGLU = "silu", "clamped_swiglu"
ACTIVATIONS = (SILU, CLAMPED_SWIGLU)
ALPHA, LIMIT = 1.702, 7.0
