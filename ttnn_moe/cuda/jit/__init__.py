"""CUDA C++ kernels: NVRTC compiles each when a call first needs it, and a store on disk keeps the code.

spec.py says what a kernel is and what its key covers; store.py keeps compiled code; build.py brings both together;
load.py puts code on a GPU. Only load.py needs a GPU.
"""
