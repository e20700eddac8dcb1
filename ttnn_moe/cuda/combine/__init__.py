"""Combine of ranks on GPUs: gpu_kernels/cuda/combine, the kernels of ttnn_moe/parallel/hierarchical."""
