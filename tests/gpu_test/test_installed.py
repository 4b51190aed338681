"""Step `installed`: what of it needs no GPU."""

from megarl.gpu_test.installed import cudnn


def test_another_cudnn_than_torchs_is_a_check_that_is_wrong() -> None:
    def refused() -> int:
        raise RuntimeError("PyTorch was compiled against (9, 20, 0) but found runtime version (9, 14, 0)")

    check = cudnn(refused)
    assert check.ok is False and "(9, 14, 0)" in check.found and "LD_LIBRARY_PATH" in check.found
    right = cudnn(lambda: 92000)
    assert (right.ok, right.found) == (None, "92000")
