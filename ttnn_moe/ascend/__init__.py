"""The operator on Ascend 910B, through torch_npu's own operators. Never run on an NPU: see docs/ascend.md."""
