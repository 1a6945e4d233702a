"""Small files that only save work: what a large file's content told once, by what changes when that content does.

One that can't be read or written costs the work again and nothing else.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from pathlib import Path


def identity(file: Path) -> str:
    """A file, by what changes when its content does; one that isn't there by its path alone."""
    try:
        stat = file.stat()
    except OSError:
        return str(file)
    return f"{file} {stat.st_size} {stat.st_mtime_ns} {stat.st_ino}"


def name(about: str) -> str:
    """A file name for what is known of ``about``."""
    return hashlib.sha256(about.encode()).hexdigest()[:24]


def write(path: Path, text: str) -> None:
    """Write it whole, beside its readers, if that can be done."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh.write_text(text)
        fresh.replace(path)
