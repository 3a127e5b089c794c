"""The calibration file: where it is, what it gives a job, and that one which cannot be right is refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from shoal.comm.calibration import Calibration, WrongCalibration, calibration_path, network_here, read_calibration
from shoal.comm.choice import on_one_host
from shoal.comm.network import DEFAULT, LinkTimes, NetworkTimes, agree_on

WHOLE = """
[links.inside]
latency_s = 2e-5
byte_s = 1.5e-10
reduce_byte_s = 0
error = 0.1

[links.between]
latency_s = 1e-4
byte_s = 8e-10
reduce_byte_s = 2e-11

[backend]
fastest = "gloo"

[compute]
of = "other readers"
"""


def test_the_file_gives_network_and_backend_whatever_other_tables_there_are(tmp_path: Path) -> None:
    (tmp_path / "file.toml").write_text(WHOLE)
    network = NetworkTimes(LinkTimes(2e-5, 1.5e-10, 0.0), LinkTimes(1e-4, 8e-10, 2e-11))
    assert read_calibration(tmp_path / "file.toml") == Calibration(network, "gloo")


def test_without_a_file_there_is_no_calibration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_calibration(tmp_path / "nothing.toml") is None
    monkeypatch.setenv("SHOAL_CALIBRATION", "")
    assert read_calibration() is None
    assert network_here() == DEFAULT


def test_the_file_is_where_the_variables_say() -> None:
    home = {"HOME": "/home/someone"}
    assert calibration_path(home) == Path("/home/someone/.config/shoal/calibration.toml")
    configuration = {**home, "XDG_CONFIG_HOME": "/etc/mine"}
    assert calibration_path(configuration) == Path("/etc/mine/shoal/calibration.toml")
    assert calibration_path({**configuration, "SHOAL_CALIBRATION": "/a/file"}) == Path("/a/file")
    assert calibration_path({**configuration, "SHOAL_CALIBRATION": ""}) is None
    assert calibration_path({}) is None


def test_a_home_that_may_not_be_read_is_no_reason_to_refuse_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*_: object, **__: object) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_text", denied)
    with pytest.raises(WrongCalibration, match="Permission denied"):
        read_calibration()
    monkeypatch.delenv("SHOAL_CALIBRATION")
    monkeypatch.setenv("HOME", "/another")
    assert read_calibration() is None


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ("[links.inside]", "[links.inside", "it is not TOML"),
        ("latency_s = 2e-5\n", "", r"\[links.inside\] has no latency_s"),
        ("[links.between]", "[links.betwen]", r"\[links\] has an unknown key 'betwen' \(did you mean 'between'\?\)"),
        ('[backend]\nfastest = "gloo"', "backend = 3", "it has no backend"),
        ('fastest = "gloo"', "", r"\[backend\] has no fastest"),
        ("byte_s = 8e-10", "byte_s = -8e-10", r"byte_s of \[links.between\] is -8e-10; .* above 0 to 0.001"),
        ("byte_s = 8e-10", "byte_s = nan", "byte_s .* is nan"),
        ("latency_s = 1e-4", "latency_s = inf", "latency_s .* is inf"),
        ("latency_s = 1e-4", "latency_s = 0", "latency_s .* is 0; "),
        ("latency_s = 1e-4", "latency_s = 100", "expected seconds, above 0 to 60"),
        ("latency_s = 1e-4", "latency_s = true", "latency_s .* is True"),
        ("latency_s = 1e-4", 'latency_s = "fast"', "latency_s .* is 'fast'"),
        ("reduce_byte_s = 0", "reduce_byte_s = -1", "reduce_byte_s .* is -1; expected seconds, 0 to 0.001"),
        ('"gloo"', '"nccl"', "fastest .* is 'nccl'; expected 'shoal' or 'gloo'"),
    ],
)
def test_a_file_that_cannot_be_right_is_refused(tmp_path: Path, before: str, after: str, words: str) -> None:
    path = tmp_path / "file.toml"
    assert before in WHOLE
    path.write_text(WHOLE.replace(before, after))
    with pytest.raises(WrongCalibration, match=words) as refused:
        read_calibration(path)
    assert str(refused.value).startswith(f"the calibration file {path}: ")
    assert str(refused.value).endswith("delete it, or measure anew with `shoal calibrate`")


def test_what_is_no_text_or_no_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    for path, says in ((tmp_path / "bytes", "it is not TOML"), (tmp_path, "it cannot be read")):
        with pytest.raises(WrongCalibration, match=says):
            read_calibration(path)


def test_predictions_without_a_group_follow_the_file_and_inside_a_job_what_its_ranks_agreed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    choice = on_one_host("dp", "all_reduce", 1 << 16, 2)
    assert choice == "butterfly"
    # Messages for next to nothing: then the fewest bytes are the cheapest.
    (tmp_path / "file.toml").write_text(WHOLE.replace("latency_s = 2e-5", "latency_s = 1e-12"))
    monkeypatch.setenv("SHOAL_CALIBRATION", str(tmp_path / "file.toml"))
    assert on_one_host("dp", "all_reduce", 1 << 16, 2) == "rabenseifner"
    agree_on(DEFAULT)
    try:
        assert on_one_host("dp", "all_reduce", 1 << 16, 2) == choice
    finally:
        agree_on(None)


@pytest.mark.processes
def test_reading_it_takes_neither_torch_nor_numpy_and_pydantic_only_if_there_is_one() -> None:
    code = (
        "import sys, shoal.cluster, shoal.comm.choice; from shoal.comm.calibration import read_calibration; "
        "found = read_calibration(); print(found, {'torch', 'numpy', 'pydantic'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout == "None set()\n"
