"""``python -m supervisor`` is ``llmctl``."""

from supervisor.cli import main

main()
