"""Every case of the contract, on every backend that this machine runs."""

from contract_cases import *  # noqa: F403  (tests: they run here)
