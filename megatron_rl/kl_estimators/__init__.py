"""Each file declares an estimator of KL(policy, reference); its Triton twin is in twins_triton.py, or in a file beside it."""
