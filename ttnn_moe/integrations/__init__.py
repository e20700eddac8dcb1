"""The operator inside other projects: one package each, imported by name."""
