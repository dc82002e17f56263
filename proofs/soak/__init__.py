"""Hours of mixed load with outages in every state, judged all the time and at the end.

python -m proofs soak --minutes 120 --broker redis --seed 1 --out soak.json
"""

from __future__ import annotations

# Workers and clients import this file with theirs: nothing heavy here.
from proofs.trial.arguments import BROKERS, parser


def main(arguments: list[str]) -> int:
    """Soak; exit with 1 if a promise was broken."""
    options = parser("soak", __doc__ or "", rate=1.0, clients=2, pools="prefork,solo,prefork")
    options.add_argument("--minutes", type=float, default=120.0, help="of load and faults, on each broker (120)")
    options.add_argument("--out", help="write the figures there, as Markdown if it ends in .md, else as JSON")
    given = options.parse_args(arguments)
    from proofs.soak.soak import Soak

    wrong = 0
    for broker in BROKERS[given.broker]:
        soak = Soak(
            minutes=given.minutes, broker=broker, seed=given.seed, rate=given.rate, clients=given.clients,
            pools=given.pools.split(","), out=given.out,
        )  # fmt: skip
        wrong += soak.run()
    return 1 if wrong else 0
