"""The kernels' cases on a GPU that is there by name only: `python -m tests.gpu_test.shadow_kernels`; a JSON line each."""

from megarl.shadow import device


def main() -> None:
    device.load()
    import json
    import os

    from megarl.shadow import cuda, transformer_engine

    running: list = []

    def current():
        return running[0] if running else None

    cuda.install(cuda.Card(), current)
    transformer_engine.install(current)
    from megarl.gpu_test import family_kernels
    from megarl.gpu_test.kernels import TORCH, TRANSFORMER_ENGINE
    from megarl.shadow.mode import FakeMode, Shadow

    running.append(Shadow())
    with FakeMode(), running[0]:
        for name, (case, _) in {**TORCH, **TRANSFORMER_ENGINE, **family_kernels.TRANSFORMER_ENGINE}.items():
            fits = [pair.found.shape == pair.expected.shape for pair in case("cuda")]
            print(json.dumps([name, fits]), flush=True)
    # Not by Python's end, in which this process was once aborted though all was done ("terminate called without an active exception").
    os._exit(0)


if __name__ == "__main__":
    main()
