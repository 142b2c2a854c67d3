"""The other ``dynamiq`` of PyPI, in the same folder, is found at import and named."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import dynamiq

OURS = Path(dynamiq.__file__).parent


def import_from(site: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "import dynamiq; print(dynamiq.__file__)"],
        env={**os.environ, "PYTHONPATH": str(site)},
        cwd=site,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def install_other(site: Path) -> None:
    info = site / "dynamiq-0.99.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: dynamiq\nVersion: 0.99.0\n")
    (info / "RECORD").write_text("dynamiq/__init__.py,,\n")


def test_installed_over_ours(tmp_path: Path) -> None:
    shutil.copytree(OURS, tmp_path / "dynamiq")
    install_other(tmp_path)
    result = import_from(tmp_path)
    assert result.returncode == 1
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: the package 'dynamiq' 0.99.0, another project")
    assert "pip uninstall dynamiq dynamiq-allreduce" in last


def test_installed_elsewhere_is_no_harm(tmp_path: Path) -> None:
    shutil.copytree(OURS, tmp_path / "ours" / "dynamiq")
    install_other(tmp_path / "theirs")
    result = import_from(tmp_path / "ours")
    assert result.returncode == 0, result.stderr
