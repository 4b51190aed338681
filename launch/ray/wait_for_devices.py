"""Waits until all nodes of a Ray cluster are there with their devices.

    wait_for_devices.py ADDRESS:PORT --nodes N --devices D --kind GPU|CPU --seconds S

Exit code 1: they were not there within S seconds; says which were. To be run on a host of the cluster.
"""

import argparse
import sys
import time

import ray


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("address")
    for name in ("nodes", "devices", "seconds"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--kind", choices=("GPU", "CPU"), required=True)
    options = parser.parse_args()
    ray.init(address=options.address, log_to_driver=False, logging_level="error")
    end, told = time.monotonic() + options.seconds, None
    while True:
        nodes = {
            node["NodeManagerAddress"]: int(node["Resources"].get(options.kind, 0))
            for node in ray.nodes()
            if node["Alive"]
        }
        ready = sum(count >= options.devices for count in nodes.values())
        there = ", ".join(f"{address}: {count}" for address, count in sorted(nodes.items()))
        if there != told:
            told = there
            print(f"wait_for_devices: {ready} of {options.nodes} nodes have {options.devices} {options.kind}s ({there})", flush=True)  # fmt: skip
        if ready >= options.nodes:
            return 0
        if time.monotonic() > end:
            print(f"wait_for_devices: no more came within {options.seconds} s", file=sys.stderr)
            return 1
        time.sleep(1)


if __name__ == "__main__":
    sys.exit(main())
