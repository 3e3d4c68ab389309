"""Log-probabilities of taken tokens over a sharded vocabulary; a public function, a torch reference, later a Triton twin each."""
