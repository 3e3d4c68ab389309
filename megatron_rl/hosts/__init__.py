"""The trainers that call this package: what they hand over, and what they do with the result. Their dictionaries stop here."""

# Trainers that call our reducer or our loss, each a Python package of that name.
ROLLOUT_HOST_NAMES = ("miles", "slime")
# Trainers with a parser of flags, to which ours are added.
HOST_NAMES = (*ROLLOUT_HOST_NAMES, "megatron_lm")
# Trainers that settings configure, a.b=value on the line or in a file.
SETTINGS_NAMES = ("verl", "nemo_rl", "roll", "skyrl")
# megatron_rl.hosts.<name> is the adapter of each.
ADAPTER_NAMES = (*HOST_NAMES, *SETTINGS_NAMES)
