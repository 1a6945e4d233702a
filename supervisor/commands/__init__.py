"""One module a command: parse, call, print, exit code. Nothing is decided here."""
