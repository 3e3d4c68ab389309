"""The tables of docs/hosts/migration.md, made of the rows of `megatron-rl explain --framework`, and where these were read."""

from __future__ import annotations

from megatron_rl.commands.explain.peers import FACTOR_OF_DIVISOR, PEERS, title

READ_AT = {
    "verl": "1dda039b9 of 2026-08-22 and its releases 0.5 to 0.9",
    "TRL": "f2cd57710 of 2026-07-24",
    "Liger": "ead96b61 of 2026-08-21",
    "OpenRLHF": "3c3be623 of 2026-08-13",
    "NeMo-RL": "7ea279abf of 2026-08-22",
    "open-instruct": "e6c3044aa of 2026-08-20 and 69fb6d933 of 2025-10-10",
    "SkyRL": "a9564572e of 2026-08-21",
    "ROLL": "8eb27cc2 of 2026-08-19",
    "prime-rl": "559b44772 of 2026-08-21",
    "AReaL": "00ed92443",
    "Fast-LLM": "7d61a1ba of 2026-07-20 and its #502 at 227f8bc1",
    "PipelineRL": "58d3934 of 2026-06-19",
    "miles": "31f1ca961 of 2026-08-21 and its #1328 at a120dec6a",
    "slime": "624b824a8 of 2026-08-21",
    "Megatron-LM": "d98e8a64dd of 2026-08-22",
    "Dr. GRPO": "dfca49d of 2025-08-27, its authors' code",
    "DeepSpeed": "edaa72212 of 2026-08-22",
}


def aggregation_rows() -> list[str]:
    """The first table of docs/hosts/migration.md."""
    rows = ["| elsewhere | here | mind |", "|---|---|---|"]
    for peer in PEERS:
        if peer.aggregation is None and peer.flags is not None:
            continue
        here = "none, on purpose" if peer.aggregation is None else f"`{peer.aggregation}`"
        here += "" if peer.divisor is None else f", divisor {peer.divisor}"
        rows.append(f"| {title(peer.framework, peer.setting)} | {here} | {peer.note} |".replace("|  |", "| |"))
    return rows


def divisor_rows() -> list[str]:
    """The second table: settings that are given an L."""
    rows = ["| from | x ours | so take |", "|---|---|---|"]
    for peer in PEERS:
        factor = FACTOR_OF_DIVISOR.get(peer.divisor or "")
        if factor is not None:
            take = "the same L" if peer.divisor == "L" else peer.divisor
            rows.append(f"| {title(peer.framework, peer.setting)} | {factor} | {take} |")
    return rows
