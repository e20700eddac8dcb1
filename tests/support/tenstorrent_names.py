"""Names of the runs of tenstorrent_runs.py, known without ttnn."""

from __future__ import annotations

from ttnn_moe.selfcheck.edges import CASES

LAYER = """
any_partition broken_ids routing_4096 steps idle_weights_are_not_read nothing_routed_here windows_and_long_chains
random_sizes shared_tokens_never_race qwen3_1 qwen3_32 qwen3_128 skewed_4096 harvested_grids
"""
HOST = """
program_cache ttnn_tensors bad_input_is_refused bfloat8_b_weights bfloat4_b_weights mixed_weights banked_weights
weights_on_disk more_tokens_than_a_program_takes
"""
MODEL = "model_logits model_answers model_weights_on_disk model_qwen3_layer model_eight_bit_keys_and_draws"
# test_tenstorrent_host.py shows that sizes that are not whole tiles are refused
TILED = [f"case_{case}" for case in CASES if case.H % 32 == 0 and case.I % 32 == 0]
NAMES = [*LAYER.split(), *HOST.split(), *MODEL.split(), *TILED]
MESH_NAMES = [
    *"mesh_partition mesh_split mesh_banked mesh_uniform mesh_narrow mesh_qwen3 mesh_steps_and_refusals".split(),
    *"mesh_model_logits mesh_model_answers mesh_model_weights_on_disk".split(),
]
