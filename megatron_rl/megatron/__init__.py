"""The seam to Megatron-Core: models, attention, schedule, CPU support. Never computes a loss, never reads a flag."""
