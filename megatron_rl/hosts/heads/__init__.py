"""Our head and our log-probabilities inside the trainers: hidden states leave a model where the trainer expects logits."""
