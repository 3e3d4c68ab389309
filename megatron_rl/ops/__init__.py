"""Log-probabilities of taken tokens over a sharded vocabulary: public functions, a torch reference and a Triton twin each."""
