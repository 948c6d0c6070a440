"""The table of docs/parity.md: every layout of the parity suite against one rank, with what differed most.

On a CPU over gloo; about ten minutes on two cores.
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[1]))

from helpers.parity import Bench, differences
from helpers.ranks import RankPool
from parallel.test_parity import CASES


def main() -> None:
    pool = RankPool(4)
    bench = Bench(pool)
    print("| case | ranks | loss | worst gradient | median gradient | adapter after 3 steps | grad norm | scores |")
    print("|---|---|---|---|---|---|---|---|")
    try:
        for case in CASES:
            wanted = bench.one_rank(case)
            apart = [differences(found, wanted) for found in bench.all_ranks(case)]
            worst = {name: max(rank[name] for rank in apart) for name in apart[0]}
            kinds = {
                kind: [v for name, v in worst.items() if name.startswith(kind)]
                for kind in ("loss", "gradient", "adapter", "score")
            }
            norms = [v for name, v in worst.items() if name.endswith("grad_norm")]
            numbers = [
                max(kinds["loss"]), max(kinds["gradient"]), median(kinds["gradient"]), max(kinds["adapter"]),
                max(norms), max(kinds["score"]),
            ]  # fmt: skip
            cells = " | ".join(f"{n:.1e}" if n else "0" for n in numbers)
            print(f"| {case.name} | {case.ranks} | {cells} |", flush=True)
    finally:
        pool.close()


if __name__ == "__main__":
    main()
