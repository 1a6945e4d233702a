"""Reading a preset is strict, and its errors name file, line and the nearest right word."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from supervisor import paths, preset
from supervisor.errors import Error, Exit
from supervisor.preset import Preset

HELP = Path(__file__).with_name("data") / "llama-server-help.txt"
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
    return preset.read(path, overrides)


def refused(tmp_path: Path, rest: str, *overrides: str) -> Error:
    with pytest.raises(Error) as raised:
        read(tmp_path, rest, *overrides)
    assert raised.value.exit is Exit.CONFIG
    assert "\n" not in raised.value.message
    return raised.value


def test_left_alone_every_option_has_its_declared_default(tmp_path: Path) -> None:
    found = read(tmp_path)
    assert found.name == "mine"
    assert all(getattr(found, name) == field.default for name, field in preset.options().items())


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
    ("line", "says"),
    [
        ("slots: 0", ["slots is '0'", "greater than or equal to 1"]),
        ("slots: 257", ["slots is '257'", "less than or equal to 256"]),
        ("slots: two", ["slots is 'two'", "integer"]),
        ("slots: 1.5", ["slots is '1.5'", "integer"]),
        ("slots: true", ["slots is 'true'", "integer"]),
        ("slots:", ["slots is ''", "integer"]),
        ("slots: [1]", ["slots is ['1']"]),
        ("cache_type_k: q9_0", ["cache_type_k is 'q9_0'", "'q8_0'"]),
        ("flash_attention: false", ["flash_attention is 'false'", "'on', 'off' or 'auto'"]),
    ],
)
def test_a_bad_value_is_named_with_file_line_and_bounds(line: str, says: list[str], tmp_path: Path) -> None:
    error = refused(tmp_path, f"about: x\n{line}\n")
    assert error.message.startswith(f"{tmp_path}/mine.yaml:{MODEL_LINES + 2}: ")
    for text in says:
        assert text in error.message


@pytest.mark.parametrize(
    ("rest", "line", "hint"),
    [
        ("slot: 2\n", MODEL_LINES + 1, "did you mean slots?"),
        ("\nabout: x\ncontxt: 2\n", MODEL_LINES + 3, "did you mean context?"),
        ("zzz: 2\n", MODEL_LINES + 1, "one of: about, model, "),
        ("<<: {slots: 2}\n", MODEL_LINES + 1, "one of: "),
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


def test_the_name_is_the_files_and_no_key(tmp_path: Path) -> None:
    assert "name" in refused(tmp_path, "name: other\n").message


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


def test_a_bad_value_of_set_is_named_as_such_and_not_with_a_line(tmp_path: Path) -> None:
    assert refused(tmp_path, "slots: 2\n", "slots=0").message.startswith("--set slots: slots is '0', but should be")


@pytest.mark.parametrize(
    ("override", "hint"), [("slot=2", "--set slots=…"), ("zzz=2", "one of: about, "), ("model=x", ""), ("name=x", "")]
)
def test_set_of_what_is_no_option_is_refused(override: str, hint: str, tmp_path: Path) -> None:
    assert refused(tmp_path, "", override).hint.startswith(hint)


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


@pytest.mark.parametrize("name", ["../presets/tiny", "/etc/passwd", "", "."])
def test_a_name_is_no_path(name: str, home: paths.Home) -> None:
    with pytest.raises(Error, match="there is no preset"):
        preset.load(name, home)


# What is declared.


def test_every_option_has_help_and_a_flag_that_the_engine_knows() -> None:
    known = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", HELP.read_text()))
    for name, field in preset.options().items():
        assert field.description, name
        assert field.json_schema_extra["flag"] in known, name


def test_every_options_default_is_one_that_the_option_takes(tmp_path: Path) -> None:
    lines = "".join(f"{name}: {field.default}\n" for name, field in preset.options().items())
    assert read(tmp_path, lines) == read(tmp_path)


def test_a_preset_can_not_be_changed(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="frozen"):
        read(tmp_path).slots = 3  # type: ignore[misc]
