"""experiments: protocols that turn a specification into stored, reproducible data."""
