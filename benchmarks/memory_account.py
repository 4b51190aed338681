"""Memory of a tiny model with and without adapters, as real ranks allocate it, compared with the plan's.

Weights, gradients and optimizer states are the storages after a training step, activations the most that autograd keeps in
it (in float32, with megarl's modules in torch). Each layout runs on gloo ranks of this machine.

    python benchmarks/memory_account.py --out memory_account.json
"""

import argparse
import json
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megarl.config.schema.models import LoraConfig
from tests.costs.measure import measure_rank
from tests.costs.models import make_models
from tests.ranks import RankPool

LAYOUTS = {"one": (1, {}), "tp2_sp": (2, {"tp": 2, "sp": True}), "pp2": (2, {"pp": 2}), "dp2": (2, {})}
TERMS = ("weights", "gradients", "optimizer", "activations")


@dataclass(frozen=True)
class Measured:
    """A model in a layout: bytes of its fullest rank, by term (allocated, planned)."""

    family: str
    layout: str
    lora_rank: int
    terms: dict[str, tuple[int, int]]


def measure(pool: RankPool, folder: str, family: str, layout: str, rank: int) -> Measured:
    world, sizes = LAYOUTS[layout]
    lora = LoraConfig(rank=rank) if rank else None
    ranks = pool.run(measure_rank, folder, sizes, {"lora": lora}, world=world)
    terms = {
        term: tuple(max(by_term[term] for by_term in column) for column in zip(*ranks, strict=True))
        for term in TERMS
    }
    return Measured(family, layout, rank, terms)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--families", nargs="+", default=["qwen2", "deepseek_v3"])
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--lora-ranks", nargs="+", type=int, default=[0, 8], help="0: no adapters")
    parser.add_argument("--out", required=True)
    options = parser.parse_args()
    pool, results = RankPool(), []
    try:
        with tempfile.TemporaryDirectory() as folder:
            folders = make_models(Path(folder), options.families)
            for family in options.families:
                for layout in options.layouts:
                    for rank in options.lora_ranks:
                        results.append(measure(pool, folders[family], family, layout, rank))
                        terms = ", ".join(
                            f"{term} {found:,} (planned {planned:,})"
                            for term, (found, planned) in results[-1].terms.items()
                        )
                        print(f"{family} {layout} rank {rank}: {terms}", flush=True)
    finally:
        pool.close()
    Path(options.out).write_text(
        json.dumps({"results": [asdict(result) for result in results]}, indent=2) + "\n"
    )


if __name__ == "__main__":
    main()
