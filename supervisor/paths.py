"""Where llmctl keeps things. ``LLMCTL_HOME=/some/dir`` moves all of it under one folder; otherwise the platform's user folders are used.

Nothing is created here: whoever writes a file makes its folder.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

APP = "llmctl"


@dataclass(frozen=True, slots=True)
class Home:
    """The folders of one installation. Two llmctl processes with the same ``run`` are the same instance."""

    config: Path
    """The user's own: settings, and presets that win over shipped ones."""
    data: Path
    """What is worth keeping: engines, models, the ledger."""
    cache: Path
    """What can be fetched or built again: sources, build trees, downloads."""
    state: Path
    """Logs."""
    run: Path
    """Sockets, the lock and the description of the running instance; mode 0700."""

    @property
    def presets(self) -> Path:
        """The user's preset files."""
        return self.config / "presets"

    @property
    def config_file(self) -> Path:
        """The user's settings (``config``); may not be there."""
        return self.config / "config.yaml"

    @property
    def engines(self) -> Path:
        """One folder an engine, named by its key, and the link ``current``."""
        return self.data / "engines"

    @property
    def toolkits(self) -> Path:
        """Private CUDA toolkits assembled from wheels."""
        return self.data / "toolkits"

    @property
    def models(self) -> Path:
        """GGUF files, each in a folder named after where it came from."""
        return self.data / "models"

    @property
    def ledger(self) -> Path:
        """The SQLite file of request records."""
        return self.data / "ledger.sqlite"

    @property
    def bench(self) -> Path:
        """Results of ``llmctl bench``."""
        return self.data / "bench"

    @property
    def logs(self) -> Path:
        """Log files of llmctl and its children."""
        return self.state / "logs"


def home(env: Mapping[str, str] = os.environ) -> Home:
    """The folders for this environment: ``LLMCTL_HOME`` if set, else the user folders of the platform."""
    if root := env.get("LLMCTL_HOME"):
        top = Path(root).expanduser().absolute()
        return Home(top / "config", top / "data", top / "cache", top / "state", top / "run")
    import platformdirs

    dirs = platformdirs.PlatformDirs(APP, appauthor=False)
    return Home(
        config=dirs.user_config_path,
        data=dirs.user_data_path,
        cache=dirs.user_cache_path,
        state=dirs.user_state_path,
        # Not XDG_RUNTIME_DIR: a cron job or a su has none, and would not see the llmctl of the login session.
        run=dirs.user_state_path / "run",
    )


def data_folder(name: str) -> Path:
    """A folder of shipped data, ``presets`` or ``build``: inside the wheel beside the code, in a checkout at the top level."""
    packaged = Path(__file__).parent / "data" / name
    return packaged if packaged.is_dir() else Path(__file__).parent.parent / name
