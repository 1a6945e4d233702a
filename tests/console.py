"""A command line in this process: what it says and its exit code, in a tenth of the time that a process needs to import the program.

For commands that answer and end. What is started, signalled or left behind is tried with real ones (``conftest.Box``).
"""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from collections.abc import Mapping

import pytest

from supervisor import cli


def llmctl(env: Mapping[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    """Run ``llmctl WORDS`` with these variables and none of the outer llmctl's; as ``subprocess.run`` gives it."""
    out, err = io.StringIO(), io.StringIO()
    code = 0
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        patch.setattr(sys, "argv", ["llmctl", *words])
        for name in [name for name in os.environ if name.startswith("LLMCTL_")]:
            patch.delenv(name)
        for name, value in env.items():
            patch.setenv(name, value)
        try:
            cli.main()
        except SystemExit as ended:
            code = int(ended.code or 0)
    return subprocess.CompletedProcess(words, code, out.getvalue(), err.getvalue())
