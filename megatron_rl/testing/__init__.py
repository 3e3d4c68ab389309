"""What a user's own tests need: ranks on CPU, layout invariance, a pytest plugin. Never imported by a training run."""
