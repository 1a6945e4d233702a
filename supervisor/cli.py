"""The ``llmctl`` command: finds the command's module, and turns an :class:`~supervisor.errors.Error` into one sentence and an exit code.

Each module of ``supervisor.commands`` holds one click command named ``command``. It is imported only when asked for, so that
``llmctl version`` doesn't pay for a web server.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any, Final

import click

from supervisor import render
from supervisor.errors import Error, Exit

COMMANDS: Final = (
    "up",
    "down",
    "status",
    "top",
    "switch",
    "restart",
    "drain",
    "unload",
    "logs",
    "usage",
    "why",
    "bench",
    "compare",
    "presets",
    "show",
    "plan",
    "check",
    "schema",
    "pull",
    "build",
    "engine",
    "pack",
    "version",
)


class _Commands(click.Group):
    """A group whose members are modules, imported on first use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names in the order a newcomer meets them."""
        return list(COMMANDS)

    def invoke(self, ctx: click.Context) -> Any:  # noqa: ANN401
        """Run the command. A reader of our output that went away (`llmctl logs | head`) is no error; click would make it exit code 1."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            sys.stderr.close()
            os._exit(0)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of that name, or None."""
        if cmd_name not in COMMANDS:
            import difflib

            close = difflib.get_close_matches(cmd_name, COMMANDS, n=1)
            hint = f"llmctl {close[0]}" if close else "llmctl --help"
            raise Error(f"there is no command {cmd_name!r}", exit=Exit.USAGE, hint=hint)
        module = importlib.import_module(f"supervisor.commands.{cmd_name}")
        found = module.command
        assert isinstance(found, click.Command)
        return found


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def llmctl(debug: bool) -> None:
    """One home box, one llama.cpp server per preset, one OpenAI endpoint in front.

    \b
    llmctl up tiny        serve the built-in model at http://127.0.0.1:8080/v1
    llmctl status         what runs
    llmctl down           stop it
    """


def main() -> None:
    """Run the command line; the process ends with an exit code of :class:`~supervisor.errors.Exit`."""
    debug = "--debug" in sys.argv[1:]
    try:
        code = llmctl(standalone_mode=False)
        if isinstance(code, int) and code:  # what a command gave to ctx.exit()
            sys.exit(code)
    except Error as error:
        if debug:
            raise
        render.error(error)
        sys.exit(error.exit)
    except click.exceptions.NoArgsIsHelpError as error:
        render.say(error.format_message())
        sys.exit(Exit.USAGE)
    except click.ClickException as error:
        path = error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx else "llmctl"
        said = error.format_message().rstrip(".")
        render.error(Error(said[:1].lower() + said[1:], exit=Exit.USAGE, hint=f"{path} --help"))
        sys.exit(Exit.USAGE)
    except click.Abort:
        sys.exit(130)
    except Exception as exc:
        if debug:
            raise
        render.error(Error(f"llmctl met what it doesn't know: {exc!r}", exit=Exit.CHILD, hint="the same with llmctl --debug"))
        sys.exit(1)
