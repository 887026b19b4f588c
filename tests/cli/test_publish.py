"""Options of `dilocox publish`, and what it prints of a run in bundles."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

import pytest

from dilocox.cli.main import main
from dilocox.config.outer import rate_of
from dilocox.record.log.merkle import leaf_hash, root_of
from dilocox.record.log.transparency_log import read_log
from dilocox.tools.storage import uplink
from tests.support.older_record import unpacked


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    out, err = capsys.readouterr()
    assert isinstance(ended.value.code, int)
    return ended.value.code, out, err


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--to", "public", "--every", "2"], "--every: is for bundles; give --to a URL"),
        (["--to", "public", "--follow"], "--follow: is for bundles"),
        (["--to", "public", "--limit", "1mbit"], "--limit: is for bundles"),
        (["--to", "file:///tmp/x", "--link"], "--link: is for a folder"),
        (["--to", "file:///tmp/x"], "is not the folder of a run's coordinator"),
        (["--to", "nonsense://x"], "nonsense://x: cannot be opened"),
        (["--to", "ftp://me:geheim@x/y"], "the URL holds a password"),
        (["--to", "sftp://host/x"], "sftp://: shows files that are half written"),
        (["--to", "ftp://host/x"], "ftp://: shows files that are half written"),
        (["--to", "https://host/x"], "https://: shows files that are half written"),
        (["--to", "simplecache::smb://host/x"], "smb://: shows files that are half written"),
        (["--to", "file:///tmp/x", "--every", "0"], "give a number of rounds"),
        (["--to", "file:///tmp/x", "--limit", "0mbit"], "carries nothing; give a rate above 0"),
        (["--to", "file:///tmp/x", "--limit", "10MB"], "give a rate such as 10mbit"),
    ],
)
def test_what_contradicts_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: list[str], reason: str
) -> None:
    code, out, err = said(capsys, "publish", str(tmp_path / "run"), *arguments)
    assert code in (1, 2)
    assert reason in err
    assert "geheim" not in out + err


def test_a_run_in_bundles(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates: list[int | None] = []
    own = uplink.Uplink.__init__
    monkeypatch.setattr(
        uplink.Uplink, "__init__", lambda self, rate: (rates.append(rate), own(self, rate))[1]
    )
    run, url = unpacked(tmp_path), f"file://{tmp_path}/my public"
    leaves = [leaf_hash(each.encode()) for each in read_log(run / "record").entries]
    newest = f"log of {len(leaves)} statements, root {root_of(leaves).hex()[:12]}…"
    options = ["--to", url, "--every", "1", "--limit", "800mbit", "--follow"]
    code, out, err = said(capsys, "publish", str(run), *options)
    assert (code, err, rates) == (0, "", [rate_of("800mbit")])
    assert out.splitlines() == [
        f"3 new bundles, 191.5 kB; uploaded to {url}",
        f"published: 3 bundles, {newest}",
        f"how to check it: dilocox verify '{url}'",
    ]
    for place in (url, f"{tmp_path}/my public"):
        code, out, err = said(capsys, "verify", place)
        assert code == 3  # an older record, whose run file nobody signed
        line = f"PASS     bundles     3 bundles of {place}, 0.2 MB; newest: {newest}"
        assert out.splitlines()[1].startswith(line)
        assert "dilocox-verify-" not in out
        assert "other files of model" in out
    keep = tmp_path / "kept"
    code, out, err = said(capsys, "verify", url, "--keep", str(keep))
    assert (code, err) == (3, f"kept in {keep}\n")
    assert said(capsys, "verify", str(keep))[0] == 3
    assert (keep / "model").is_dir()
    copyfile, copied = shutil.copyfile, list[str]()

    def full(source: str, target: str, **kept: bool) -> str:
        if copied:
            raise OSError(errno.ENOSPC, "No space left on device")
        copied.append(source)
        return str(copyfile(source, target, **kept))

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copyfile", full)
        assert (
            "No space left on device"
            in said(capsys, "verify", url, "--keep", str(tmp_path / "cut"))[2]
        )
    assert not [each for each in tmp_path.iterdir() if "cut" in each.name]
    for place, target in ((url, keep), (str(run), tmp_path / "more")):
        code, out, err = said(capsys, "verify", place, "--keep", str(target))
        assert (code, out) == (1, "") or code == 2
        assert "--keep" in err
    next((tmp_path / "my public" / "bundles").iterdir()).write_bytes(b"")
    code, out, err = said(capsys, "verify", url, "--json")
    assert code == 1
    assert '"FAIL"' in out
    assert "nothing is kept" in said(capsys, "verify", url, "--keep", str(tmp_path / "more"))[2]
    assert not (tmp_path / "more").exists()


def test_a_run_in_a_folder_with_colons(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """It is verified, published in bundles and verified there, with stores of such names, too."""
    run, bundles = unpacked(tmp_path / "exp::1"), tmp_path / "bundles::1"
    assert said(capsys, "publish", str(run), "--to", f"file://{tmp_path}/bundles")[0] == 0
    (tmp_path / "bundles").rename(bundles)
    store = (run / "record" / "store").rename(tmp_path / "store::1")
    assert "NOT_RUN  payloads" in said(capsys, "verify", str(run))[1]
    for arguments in ([str(bundles)], [str(run), "--store", str(store)]):
        code, out, err = said(capsys, "verify", *arguments)
        assert (code, err) == (3, "")  # an older record, whose run file nobody signed
        assert "PASS     payloads" in out
    code, _, err = said(capsys, "publish", str(run), "--to", f"file://{tmp_path}/other::1")
    assert code == 1
    assert "other::1: cannot be opened (fsspec takes ::" in err
