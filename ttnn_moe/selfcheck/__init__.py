"""Checks of a backend on this machine: bounds, an oracle, the edges of the contract, and what runs them."""
