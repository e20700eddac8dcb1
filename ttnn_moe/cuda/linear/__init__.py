"""Linear layers of few rows on a GPU."""
