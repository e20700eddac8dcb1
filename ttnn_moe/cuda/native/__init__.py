"""The operator through CUDA C++ kernels, gpu_kernels/cuda, compiled by ttnn_moe/cuda/jit."""
