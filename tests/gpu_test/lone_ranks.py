"""A process of lone ranks on the CPU: `python -m tests.gpu_test.lone_ranks RECIPE JOBS`, JOBS as JSON: (keys, role, rank) each; reports
as JSON lines.
"""

import json
import sys
from dataclasses import asdict

from megarl.gpu_test.alone import LoneRunner, Meter
from megarl.plan.inputs import read_inputs


def main() -> None:
    recipe, jobs = sys.argv[1], json.loads(sys.argv[2])
    runner = LoneRunner(Meter(lambda: 0, lambda: 0, lambda: None), "cpu")
    for keys, role, rank in jobs:
        config, inputs = read_inputs(recipe, keys, check=False)
        print(json.dumps(asdict(runner.run(config, inputs, role, rank))), flush=True)


if __name__ == "__main__":
    main()
