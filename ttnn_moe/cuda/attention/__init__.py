"""Attention on a GPU, and the kernel that writes the keys and values it reads."""
