"""CUDA C++ kernels, compiled by NVRTC when they are first needed and kept on disk.

spec.py says what a kernel is and what its key covers; store.py keeps compiled code; build.py brings both together;
load.py puts code on a GPU. Only load.py needs a GPU.
"""
