"""Each file declares a selection of a step's tokens."""
