"""The frameworks that call us: what they hand us and what they do with what we return. Their dictionaries stop in this folder."""

# Hosts that call our reducer or our loss, each a Python package of that name; then all hosts. megatron_rl.hosts.<name> holds the
# host's object as HOST. A launch is of the first host that recognises its options; the last one recognises any. Needs no torch.
ROLLOUT_HOST_NAMES = ("miles", "slime")
HOST_NAMES = (*ROLLOUT_HOST_NAMES, "megatron_lm")
