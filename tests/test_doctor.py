"""doctor says what is there, and gives a cure with everything that is wrong."""

import os

import pytest

from tvmcap import doctor


def test_a_sound_machine_has_no_errors_and_every_fault_a_cure(tmp_path):
    findings = doctor.diagnose(str(tmp_path / "logs"), str(tmp_path / "cache"))
    by_name = {f.name: f for f in findings}
    assert not [f for f in findings if f.status == "error"]
    assert all(f.cure for f in findings if f.status != "ok")
    for name in (
        "python",
        "tvm",
        "tvm ffi",
        "torch",
        "code generators",
        "C compiler",
        "nvcc",
        "gpu",
    ):
        assert name in by_name and by_name[name].detail
    assert "llvm" in by_name["code generators"].detail


@pytest.mark.parametrize(
    "version, status",
    [
        ("0.1.14.post0", "ok"),
        ("0.1.14.post1", "ok"),
        ("0.1.15", "error"),
        ("0.1.15.post2", "error"),
        ("0.1.13", "error"),
        (None, "error"),
    ],
)
def test_the_abi_pair(version, status):
    finding = doctor.ffi_finding(version)
    assert finding.status == status
    assert ("<0.1.15" in finding.cure) == (status == "error")


def test_stale_shipped_records_are_a_warning():
    assert doctor.shipped_finding(12, 0).status == "ok"
    stale = doctor.shipped_finding(12, 5)
    assert stale.status == "warn" and "5 of 12" in stale.detail and "tune" in stale.cure
    (finding,) = doctor._shipped_records()
    assert finding.status in ("ok", "warn") and finding.detail


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    (finding,) = doctor._folder("tuning records", tmp_path / "file" / "logs", "log_dir")
    assert finding.status == "error" and "TVMCAP_LOG_DIR" in finding.cure
    if os.geteuid() != 0:
        (tmp_path / "closed").mkdir(mode=0o500)
        (finding,) = doctor._folder("compile cache", tmp_path / "closed" / "x", "cache_dir")
        assert finding.status == "error"


def test_missing_compilers_are_found_out(monkeypatch):
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    (finding,) = doctor._linker()
    assert finding.status == "error" and "gcc" in finding.cure


def test_threads_that_differ_from_the_cores_warn(monkeypatch):
    monkeypatch.setenv("TVM_NUM_THREADS", "999")
    finding = {f.name: f for f in doctor._cpu()}["threads"]
    assert finding.status == "warn" and "TVM_NUM_THREADS" in finding.cure


def test_a_check_that_breaks_is_a_finding_itself(monkeypatch):
    def broken(name):
        raise RuntimeError("boom")

    monkeypatch.setattr(doctor, "_version", broken)
    for slow in ("_generators", "_shipped_records"):
        monkeypatch.setattr(doctor, slow, lambda: iter(()))
    findings = doctor.diagnose()
    assert any("boom" in f.detail and f.status == "error" for f in findings)
