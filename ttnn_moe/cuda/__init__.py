"""Mixture of experts on NVIDIA GPUs."""
