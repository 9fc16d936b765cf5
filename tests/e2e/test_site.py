"""The documentation builds as a site, without a network."""

import subprocess
import sys

from repository import REPOSITORY


def test_the_site_builds_without_a_warning(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path / "site"]
    built = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120)
    assert built.returncode == 0, built.stderr
    html = (tmp_path / "site" / "index.html").read_text(encoding="utf-8")
    assert "fonts.googleapis.com" not in html
