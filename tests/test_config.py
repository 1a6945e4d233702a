"""The user's settings: read as strictly as a preset, refused before anything starts, and told to an editor."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from click.testing import CliRunner, Result

from supervisor import config, words
from supervisor.commands import check, schema
from supervisor.config import Config
from supervisor.errors import Error, Exit
from supervisor.paths import Home, home
from tests import console, fakes
from tests.fakes import gguf

FULL = "price_per_kwh: 0.32\ncurrency: EUR\nrecords_days: 90\nrecords_mib: 64\n"


@pytest.fixture
def here(tmp_path: Path) -> Home:
    found = home({"LLMCTL_HOME": str(tmp_path / "home")})
    found.config.mkdir(parents=True)
    return found


def fault(found: Home, text: str) -> Error:
    found.config_file.write_text(text)
    with pytest.raises(Error) as raised:
        config.load(found)
    assert raised.value.exit is Exit.CONFIG
    return raised.value


def test_without_a_file_everything_has_its_default(tmp_path: Path) -> None:
    assert config.load(home({"LLMCTL_HOME": str(tmp_path)})) == Config()
    assert Config() == Config(price_per_kwh=None, currency="", records_days=365, records_mib=512)


@pytest.mark.parametrize("text", ["", "\n\n", "# price_per_kwh: 0.3\n  # more\n", "{}\n"])
def test_a_file_that_says_nothing_is_every_default(here: Home, text: str) -> None:
    here.config_file.write_text(text)
    assert config.load(here) == Config()


def test_what_is_written_is_read(here: Home) -> None:
    here.config_file.write_text("# mine\n" + FULL)
    assert config.load(here) == Config(price_per_kwh=0.32, currency="EUR", records_days=90, records_mib=64)
    assert dict(config.worded(config.load(here))) == yaml.load(FULL, yaml.BaseLoader)
    assert config.worded(Config())["price_per_kwh"] == ""


@pytest.mark.parametrize("sign", ["€", "Kč", "zł", "R$", "US$", "₫", "円", "원", "руб.", "ct"])
def test_a_currency_is_letters_or_signs(here: Home, sign: str) -> None:
    here.config_file.write_text(f"currency: {sign}\n", encoding="utf-8")
    assert config.load(here).currency == sign


@pytest.mark.parametrize(
    ("text", "line", "says", "hint"),
    [
        ("currency: EUR\nprice_per_kw: 0.3\n", 2, "'price_per_kw' is not an option", "did you mean price_per_kwh?"),
        ("ledger: big\n", 1, "'ledger' is not an option", "one of: price_per_kwh, currency, records_days, records_mib"),
        ("records_days: 1\n\nrecords_days: 2\n", 3, "'records_days' stands here and in line 1", "keep one of them"),
        (
            "price_per_kwh: cheap\n",
            1,
            "price_per_kwh is 'cheap', but should be a number from 0 to 1000000",
            "price_per_kwh: 0.30",
        ),
        ("price_per_kwh: 0,32\n", 1, "with nothing between them", "price_per_kwh: 0.30"),
        ("price_per_kwh: -1\n", 1, "from 0 to 1000000", "price_per_kwh: 0.30"),
        ("price_per_kwh: .inf\n", 1, "should be a number", "price_per_kwh: 0.30"),
        ("price_per_kwh:\n", 1, "price_per_kwh is '', but", "price_per_kwh: 0.30"),
        ("price_per_kwh: [0.3]\n", 1, "price_per_kwh is a list, but should be a number", "price_per_kwh: 0.30"),
        ("currency: EUR per\n", 1, "currency is 'EUR per', but should be 1 to 8 letters or signs", "currency: EUR"),
        ("currency: 'E\\eR'\n", 1, "but should be 1 to 8 letters or signs", "currency: EUR"),
        ("currency: 12\n", 1, "should be 1 to 8 letters", "currency: EUR"),
        ("records_days: 0\n", 1, "records_days is '0', but should be a whole number from 1 to 36500", "records_days: 365"),
        ("records_days: 36501\n", 1, "from 1 to 36500", "records_days: 365"),
        ("records_mib: 15\n", 1, "records_mib is '15', but should be a whole number from 16 to 1000000", "records_mib: 512"),
        ("records_mib: 1.5\n", 1, "should be a whole number", "records_mib: 512"),
        ("- currency\n", 1, "holds no keys", "a line a setting: price_per_kwh: 0.30"),
        ("currency: EUR\n\tx: 1\n", 2, "begins with a tab", "a line a setting: price_per_kwh: 0.30"),
    ],
)
def test_what_is_wrong_is_told_with_its_line_and_a_way_out(here: Home, text: str, line: int, says: str, hint: str) -> None:
    error = fault(here, text)
    assert error.message.startswith(f"{here.config_file}:{line}: "), error.message
    assert says in error.message
    assert error.hint == hint


def test_a_misspelt_key_is_told_before_a_wrong_value(here: Home) -> None:
    assert "'record_mib'" in fault(here, "records_days: 0\nrecord_mib: 64\n").message


def test_what_is_no_file_is_refused_and_nobody_waits(here: Home) -> None:
    os.mkfifo(here.config_file)
    with pytest.raises(Error, match="it is a pipe, not a file"):
        config.load(here)
    here.config_file.unlink()
    here.config_file.symlink_to("gone.yaml")
    with pytest.raises(Error, match=r"it is a link to 'gone\.yaml', which isn't there"):
        config.load(here)


def test_a_file_that_is_too_long_is_not_taken_for_one_of_comments(here: Home) -> None:
    assert "more than 1048576 bytes" in fault(here, "#\n" * words.SIZE_BYTES).message


# check


def run(module: Any, *words_: str) -> Result:
    return CliRunner().invoke(module.command, words_, standalone_mode=False)


def test_check_reads_it_as_settings(here: Home) -> None:
    here.config_file.write_text(FULL)
    assert run(check, str(here.config_file)).stdout == "ok: price_per_kwh 0.32, currency EUR, records_days 90, records_mib 64\n"
    told = json.loads(run(check, str(here.config_file), "--json").stdout)
    assert told["ok"]
    assert told["settings"] == {"price_per_kwh": 0.32, "currency": "EUR", "records_days": 90, "records_mib": 64}


def test_check_tells_all_faults_at_once(here: Home) -> None:
    here.config_file.write_text("price: 1\nrecords_days: 0\n")
    done = run(check, str(here.config_file))
    assert [line for line in done.stderr.splitlines() if line.startswith("error: ")] == [
        f"error: {here.config_file}:1: 'price' is not an option",
        f"error: {here.config_file}:2: records_days is '0', but should be a whole number from 1 to 36500",
    ]
    assert done.return_value == Exit.CONFIG
    told = json.loads(run(check, str(here.config_file), "--json").stdout)
    assert (told["ok"], [each["line"] for each in told["faults"]]) == (False, [1, 2])


def test_check_of_a_file_that_is_not_there(here: Home) -> None:
    assert "No such file" in run(check, str(here.config_file)).stderr


def test_a_preset_may_be_called_config(here: Home) -> None:
    here.presets.mkdir()
    path = here.presets / "config.yaml"
    path.write_text("slots: 2\n")
    assert "'model' is missing" in run(check, str(path)).stderr


# schema


def test_the_schema_says_what_the_reader_does(here: Home) -> None:
    document = json.loads(run(schema, "--config").stdout)
    jsonschema.Draft202012Validator.check_schema(document)
    assert list(document["properties"]) == list(config.settings())
    assert all(each["description"] for each in document["properties"].values())
    taken = (FULL, "currency: Kč\n", "price_per_kwh: 0\n")
    refused = ("price_per_kw: 1\n", "price_per_kwh: -1\n", "currency: a b\n", "records_days: 0\n", "records_mib: 2000000\n")
    for text in (*taken, *refused):
        here.config_file.write_text(text, encoding="utf-8")
        valid = jsonschema.Draft202012Validator(document).is_valid(yaml.safe_load(text))
        assert valid is (text in taken), text
        assert (config.check(here.config_file)[1] == ()) is (text in taken), text


# up


@pytest.mark.parametrize("how", [(), ("--detach",)])
def test_up_refuses_a_broken_one_before_anything_is_claimed(here: Home, tmp_path: Path, how: tuple[str, ...]) -> None:
    here.config_file.write_text("currency: EUR\nrecords_day: 9\n")
    engine, model = fakes.install(tmp_path / "engine"), gguf.minimal(tmp_path / "m.gguf")
    env = {"LLMCTL_HOME": str(tmp_path / "home"), "LLMCTL_ENGINE": str(engine)}
    done = console.llmctl(env, "up", "tiny", "--port", "0", "--model", str(model), *how)
    assert done.returncode == Exit.CONFIG
    said = f"error: {here.config_file}:2: 'records_day' is not an option\ntry: did you mean records_days?\n"
    assert done.stderr == said
    assert not any(folder.exists() for folder in (here.run, here.data, here.state))
    assert fakes.events(engine.parent) == []
