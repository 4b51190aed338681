"""What is checked before SGLang is started."""

import pytest

from megarl.rollout import sglang_start
from megarl.rollout.sglang_start import check_version


def test_an_unknown_version_of_sglang_is_refused(monkeypatch, caplog):
    check_version(allow_unknown=False)
    monkeypatch.setattr(sglang_start, "version", lambda name: "0.9.9")
    with pytest.raises(
        ValueError, match=r"sglang 0\.9\.9 .*known to work with 0\.5\.21.*allow_unknown_version"
    ):
        check_version(allow_unknown=False)
    check_version(allow_unknown=True)
    assert "sglang 0.9.9 is installed" in caplog.text
