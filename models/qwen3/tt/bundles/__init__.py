"""Models that Tenstorrent's vllm-tt-plugin finds by themselves, where EXTRA_MODELS_DIR names this folder.

`python -m ttnn_moe.models.qwen3.tt.bundles` prints the folder.
"""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).resolve().parent
