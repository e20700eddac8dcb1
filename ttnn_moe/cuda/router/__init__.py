"""The router of a Mixture-of-Experts layer on a GPU."""
