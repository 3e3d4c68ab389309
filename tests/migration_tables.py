"""The tables of docs/hosts/migration.md, made of the rows of `megatron-rl explain --framework`."""

from __future__ import annotations

from megatron_rl.commands.explain.peers import PEERS, SAME, title


def aggregation_rows() -> list[str]:
    """The first table of docs/hosts/migration.md."""
    rows = ["| elsewhere | here | mind |", "|---|---|---|"]
    for peer in PEERS:
        if peer.flags is not None:
            continue
        here = "none, on purpose" if peer.aggregation is None else f"`{peer.aggregation}`"
        here += "" if peer.scale is None else f", divisor {peer.scale.formula}"
        rows.append(f"| {title(peer.framework, peer.setting)} | {here} | {peer.note} |".replace("|  |", "| |"))
    return rows


def divisor_rows() -> list[str]:
    """The second table: settings that are given an L."""
    rows = ["| from | x ours | so take |", "|---|---|---|"]
    for peer in PEERS:
        if peer.scale is not None and peer.scale.factor is not None:
            take = "the same L" if peer.scale is SAME else peer.scale.formula
            rows.append(f"| {title(peer.framework, peer.setting)} | {peer.scale.factor} | {take} |")
    return rows
