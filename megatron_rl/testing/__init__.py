"""What a user's own tests need: ranks on CPU, layout invariance, a pytest plugin. No training run imports it."""
