"""Reads what somebody else wrote: regular files alone, bounded and typed. No code of a file runs. docs/training.md lists it."""
