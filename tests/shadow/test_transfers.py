"""A shadow rank's checkpoint, what it sends the engines, and its parts as they leave the device and come back."""


def test_a_checkpoint_takes_nothing_of_the_device(reports) -> None:
    for report in reports.values():
        for phase in ("save", "load"):
            assert report["phases"][phase]["peak"] == report["phases"][phase]["left"] == 0
