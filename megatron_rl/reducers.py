"""The reducer that miles and slime import: `--custom-pg-loss-reducer-function-path megatron_rl.reducers.get_pg_loss_reducer`."""

from __future__ import annotations

from megatron_rl.hosts.reducer import get_pg_loss_reducer

__all__ = ["get_pg_loss_reducer"]
