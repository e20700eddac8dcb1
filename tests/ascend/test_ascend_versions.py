"""Where the versions of CANN and of the driver, and the server of a rank, are read."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import pytest

from ttnn_moe.ascend import machine, versions
from ttnn_moe.ascend.backend import AscendBackend
from ttnn_moe.parallel.exchanges.npu_limits import release_of


@pytest.fixture(autouse=True)
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No driver, no CANN, no cards, no variable; returns an empty folder."""
    monkeypatch.setattr(versions, "DRIVER_INFO", tmp_path / "version.info")
    monkeypatch.setattr(machine, "DEVICES", tmp_path)
    for name in ("HCCL_BUFFSIZE", machine.NETWORK, *versions.CANN_HOMES):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def torch_npu(known: dict[str, Any], place: str = "npu.utils") -> Any:
    utils = types.SimpleNamespace(get_cann_version=known.get)
    outer, _, inner = place.rpartition(".")
    return types.SimpleNamespace(**{outer or inner: types.SimpleNamespace(**{inner: utils}) if outer else utils})


def test_versions_are_torch_npus_or_those_of_the_drivers_file() -> None:
    known = {"CANN": "9.1.0", "DRIVER": ""}
    backend = AscendBackend()
    backend.npu = lambda: torch_npu(known)  # type: ignore[method-assign]
    assert backend.versions()[0].startswith("CANN 9.1.0, driver unknown")
    versions.DRIVER_INFO.write_text("package_version=25.0\nVersion=24.1.rc3\nascendhal_version=7.35.23\n")
    assert backend.versions()[0].startswith("CANN 9.1.0, driver 24.1.rc3")
    known["DRIVER"] = "25.0.RC1.1"
    assert backend.versions()[0].startswith("CANN 9.1.0, driver 25.0.RC1.1")
    backend.npu = types.SimpleNamespace  # type: ignore[method-assign]
    versions.DRIVER_INFO.unlink()
    assert backend.versions()[0].startswith("CANN unknown, driver unknown")


@pytest.mark.parametrize(
    "file, text, want",
    [
        ("aarch64-linux/ascend_toolkit_install.info", "package_name=Ascend-cann-toolkit\nversion=8.3.RC1\n", "8.3.RC1"),
        ("x86_64-linux/ascend_toolkit_install.info", "version=8.5.0\ninnerversion=V100R001C25\n", "8.5.0"),
        ("version.info", "Version=9.0.0\n", "9.0.0"),
        ("version.info", "innerversion=V100\n", ""),
        ("elsewhere.info", "version=9.0.0\n", ""),
    ],
)
@pytest.mark.parametrize("home", versions.CANN_HOMES)
def test_cann_is_read_from_its_folder(nowhere, monkeypatch, home: str, file: str, text: str, want: str) -> None:
    monkeypatch.setenv(home, str(nowhere))
    (nowhere / file).parent.mkdir(exist_ok=True)
    (nowhere / file).write_text(text)
    assert versions.cann(types.SimpleNamespace()) == want
    assert versions.cann(torch_npu({"CANN": "9.1.0"})) == "9.1.0", "torch_npu knows what is loaded"
    assert versions.cann(torch_npu({"CANN": "8.5.0"}, "utils")) == "8.5.0"


def test_a_version_that_is_no_text_is_unknown() -> None:
    def fail(of: str) -> str:
        raise UnicodeDecodeError("utf-8", b"\xfe", 0, 1, "invalid start byte")

    module = types.SimpleNamespace(npu=types.SimpleNamespace(utils=types.SimpleNamespace(get_cann_version=fail)))
    assert versions.cann(module) == versions.driver(module) == ""


@pytest.mark.parametrize(
    "cann, line",
    [
        ("8.3.RC1", "8.3"),
        ("8.5.0", "8.3"),
        ("8.5", "8.3"),
        ("9.0.0", "9"),
        ("9.1.0.alpha001", "9"),
        ("9.2.0-beta.1", "9"),
    ]
    + [(cann, None) for cann in ("", "8.2.RC1", "8.4.0", "8.30.0", "10.0.0", "90.1", "unknown")],
)
def test_limits_follow_the_line_of_cann(cann: str, line: str | None) -> None:
    found = release_of(cann)
    assert (found.cann[0] if found else None) == line


def test_a_rank_knows_its_server(nowhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "BOOT_ID", nowhere / "boot_id")
    npu = torch_npu({"CANN": "8.5.0"})
    npu.npu.device_count = lambda: 2
    monkeypatch.setattr(machine.socket, "gethostname", lambda: "container")
    found = machine.here(npu)
    assert (found.server, found.cards, found.cann, found.buffer) == ("container", 2, "8.5.0", "")
    assert found.lacks == machine.operators.EXCHANGE
    (nowhere / "boot_id").write_text("1b4e28ba\n")
    for i in range(16):
        (nowhere / f"davinci{i}").touch()
    (nowhere / "davinci_manager").touch()
    monkeypatch.setenv("HCCL_BUFFSIZE", "300 ")
    found = machine.here(npu)
    assert (found.server, found.cards, found.buffer) == ("1b4e28ba", 16, "300"), "hidden cards count"
    assert "HCCL_BUFFSIZE=300" in machine.describe(found)[1]


def test_versions_in_order() -> None:
    listed = ["23.0.0", "24.1.RC3", "24.1.0", "24.1.0.3", "25.0.RC1", "25.0.rc1.1", "25.0.0", "25.2.RC1", "25.10.0"]
    for i, one in enumerate(listed):
        assert [versions.is_older(one, other) for other in listed] == [i < j for j in range(len(listed))]
