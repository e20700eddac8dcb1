"""The MoE operator on NVIDIA GPUs: families of kernels, and the first of them that can run a problem."""
