"""The metrics of a step: rows of tables, their statistics, and the way of these over micro-batches and ranks."""
