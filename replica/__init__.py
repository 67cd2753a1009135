"""replica: the exact theory of the generalisation error of fine-tuning, solved over grids."""

from replica.solve import Solution, solve

__all__ = ["Solution", "solve"]
