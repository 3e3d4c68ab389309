"""Computes log-probabilities of taken tokens over a sharded vocabulary, in torch (the reference) and in Triton."""
