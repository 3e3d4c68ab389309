"""The frameworks that call this package: what they hand over, and what they do with the result. Their dictionaries stop here."""

# Hosts that call our reducer or our loss, each a Python package of that name; then all hosts. megatron_rl.hosts.<name> holds the
# host's object as HOST. A launch belongs to the first host that recognises its options; the last one takes any. Needs no torch.
ROLLOUT_HOST_NAMES = ("miles", "slime")
HOST_NAMES = (*ROLLOUT_HOST_NAMES, "megatron_lm")
# Hosts without a parser of flags: settings configure them, a.b=value on the line or in a file. megatron_rl.hosts.<name> holds the
# host's object as DOOR, megatron_rl.hosts.doors has them all.
DOOR_NAMES = ("verl", "nemo_rl", "roll", "skyrl", "prime_rl", "trl")
