"""The rules of one setting are in settings.py; these names stay until each door is a table."""

from megatron_rl.hosts.settings import Given as Given
from megatron_rl.hosts.settings import acting_clip as acting_clip
from megatron_rl.hosts.settings import clip_to_type as clip_to_type
from megatron_rl.hosts.settings import not_numbers as not_numbers
