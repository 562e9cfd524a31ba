"""Every experiment is a command that explains itself."""

import subprocess
import sys
from pathlib import Path

from PIL import Image

from experiments.tiny_pictures import EXAMPLE

ROOT = Path(__file__).parents[2]
HELP = """
import contextlib, io, runpy, sys
for name in sys.argv[1:]:
    sys.argv[:] = [name, "--help"]
    told = io.StringIO()
    try:
        with contextlib.redirect_stdout(told):
            runpy.run_module(f"experiments.{name}", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        assert not end.code, name
    # Two are the server itself, around models that are watched or slowed down.
    assert told.getvalue().startswith((f"usage: python -m experiments.{name} ", "usage: python -m serving ")), name
print("all told")
"""


def run(*arguments) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True)


def test_help_says_what_a_command_does():
    """And does nothing else: all are asked in one process, which would take hours otherwise."""
    files = [file for file in (ROOT / "experiments").glob("*.py") if '__name__ == "__main__"' in file.read_text()]
    assert len(files) > 30
    told = run("-W", "ignore", "-c", HELP, *sorted(file.stem for file in files))
    assert told.stdout == "all told\n", told.stderr


def test_the_example_picture_is_drawn(tmp_path):
    file = tmp_path / "shapes.png"
    assert run("-m", "experiments.tiny_pictures", str(file)).returncode == 0
    with Image.open(file) as drawn:
        assert drawn.tobytes() == EXAMPLE.draw().tobytes()
    for wrong in ("shapes", str(tmp_path / "nowhere" / "shapes.png")):
        refused = run("-m", "experiments.tiny_pictures", wrong)
        assert (refused.returncode, f"error: cannot write {wrong}: " in refused.stderr) == (2, True)
