"""miles, slime and Megatron-LM: what they hand us and what they do with what we return. Host dictionaries stop in this folder."""
