"""Experts spread over processes: tokens go to where their experts are, and come back weighed and summed."""

from .layer import ExpertParallel

__all__ = ["ExpertParallel"]
