"""Sums and gathers of ranks by kernels that write each other's memory: gpu_kernels/cuda/parallel."""
