"""The equations: one file a policy loss, and its Triton version beside it."""
