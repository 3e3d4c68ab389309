"""Each file declares a correction for the gap between the sampler's policy and the trainer's."""
