"""``presets``, ``show``, ``check`` and ``schema``, and that the schema says what the reader does."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from click.testing import CliRunner, Result

from supervisor import docs, paths, preset
from supervisor.commands import check, presets, schema, show
from supervisor.errors import Error
from supervisor.option import options

SHA = "ab" * 32
GOOD = f"model: {{file: m.gguf, sha256: {SHA}, hub: {{repository: a/b}}}}\n"
SHIPPED = sorted(paths.data_folder("presets").glob("*.yaml"))


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> paths.Home:
    monkeypatch.setenv("LLMCTL_HOME", str(tmp_path / "home"))
    found = paths.home()
    found.presets.mkdir(parents=True)
    return found


def run(module: Any, *words: str) -> Result:
    return CliRunner().invoke(module.command, words, standalone_mode=False)


def answer(module: Any, *words: str) -> Any:
    done = run(module, *words, "--json")
    assert done.exception is None, done.exception
    return json.loads(done.stdout)


# presets


def test_presets_lists_the_shipped_and_the_users(home: paths.Home) -> None:
    (home.presets / "mine.yaml").write_text("about: my own\n" + GOOD)
    text = run(presets).stdout
    for name in ("tiny", "turbo_4b", "balanced_9b", "cpu_fallback"):
        assert re.search(rf"^{name}\n  .+\n  for .+\n", text, re.MULTILINE), text
    assert (
        "turbo_4b\n"
        "  Qwen3.5 4B, Q4_K_M with its MTP head: the fastest answers for one user.\n"
        "  for an NVIDIA card with 8 GB (RTX 3070) that also draws a desktop\n"
        "  Qwen3.5-4B-Q4_K_M.gguf, 2.6 GiB, not fetched yet\n"
        "  --context short, medium*, long\n"
        "  --mode latency*, throughput\n\n"
    ) in text
    assert "mine\n  my own\n  m.gguf, not fetched yet\n  8,192 tokens\n\n" in text
    assert max(map(len, text.splitlines())) <= 80
    found = {each["name"]: each for each in answer(presets)["presets"]}
    assert found["turbo_4b"]["default_context"] == "medium"
    assert found["turbo_4b"]["model"]["hub"]["repository"] == "unsloth/Qwen3.5-4B-MTP-GGUF"
    assert (found["mine"]["have"], found["mine"]["model"]["bytes"], found["mine"]["modes"]) == (False, None, [])


def test_a_broken_preset_is_named_and_hides_no_other(home: paths.Home) -> None:
    (home.presets / "mine.yaml").write_text("slots: 0\n" + GOOD)
    done = run(presets)
    assert "tiny" in done.stdout
    says = f"{home.presets}/mine.yaml:1: slots is '0', but should be a whole number from 1 to 256"
    assert done.stderr == f"error: {says}\ntry: slots: 1\n"
    assert answer(presets)["broken"] == [says]


def test_a_misnamed_preset_is_named_too(home: paths.Home) -> None:
    (home.presets / "my own.yaml").write_text(GOOD)
    says = f"{home.presets}: a preset's file can't be called 'my own.yaml'"
    assert answer(presets)["broken"] == [says]
    assert run(presets).stderr.startswith(f"error: {says}\ntry: a name of at most 64 letters")


# show


def test_show_says_where_each_value_comes_from() -> None:
    found = answer(show, "turbo_4b", "--context", "long", "--set", "slots=2")
    seen = found["options"]
    assert list(seen) == list(options())
    known = {name: {key: each[key] for key in ("value", "unit", "from", "argv")} for name, each in seen.items()}
    assert known["context"] == {"value": 131072, "unit": "tokens", "from": "context long", "argv": ["--ctx-size", "131072"]}
    assert known["slots"] == {"value": 2, "unit": "", "from": "--set", "argv": ["--parallel", "2"]}
    assert known["unified"] == {"value": "off", "unit": "", "from": "default", "argv": ["--no-kv-unified"]}
    assert known["threads"] == {"value": "auto", "unit": "", "from": "default", "argv": []}
    assert known["draft_length"] == {"value": 2, "unit": "tokens", "from": "mode latency", "argv": []}
    assert known["temperature"] == {"value": 0.7, "unit": "", "from": "chain chat", "argv": ["--temp", "0.7"]}
    assert found["sampling_source"] == "the Qwen3.5 model card (4B and 9B agree), non-thinking, general"
    assert (seen["slots"]["takes"], seen["slots"]["help"]) == ("1–256", "requests decoded at the same time")
    assert (found["context"], found["mode"], found["model"]["mtp"]) == ("long", "latency", True)
    assert found["notes"] == ["mode latency has speculative mtp, context long has off: the context wins"]
    assert found["fallback"] == ["cache_ram 256", "context 32768", "context 16384", "fewer_layers"]


def test_show_is_a_table_for_people() -> None:
    text = run(show, "turbo_4b", "--context", "long").stdout
    assert text.startswith("turbo_4b, context long, mode latency: Qwen3.5-4B-Q4_K_M.gguf from unsloth/Qwen3.5-4B-MTP-GGUF\n")
    assert re.search(r"^context +131072 +tokens +context long +--ctx-size 131072 *$", text, re.MULTILINE), text
    assert re.search(r"^temperature +0\.7 +chain chat +--temp 0\.7 *$", text, re.MULTILINE), text
    assert "\nchain chat: the Qwen3.5 model card (4B and 9B agree), non-thinking, general\n" in text
    assert "may be given up, in this order: cache_ram 256; context 32768; context 16384; fewer_layers\n" in text
    assert text.endswith("mode latency has speculative mtp, context long has off: the context wins\n")


def test_show_command_prints_the_line_that_would_run() -> None:
    line = run(show, "turbo_4b", "--command", "--gpu", "rtx3070").stdout
    words = answer(show, "turbo_4b", "--command", "--gpu", "rtx3070")["argv"]
    assert line.split() == words
    assert "--spec-type draft-mtp" in line
    assert "auto" not in words
    with pytest.raises(Error, match="there is no preset 'turbo'"):
        raise run(show, "turbo").exception or AssertionError


def test_show_tells_of_single_options_all_there_is_to_know() -> None:
    assert run(show, "turbo_4b", "draft_length", "ubatch", "gpu_layers", "--set", "speculative=ngram").stdout == (
        "draft_length: 2 tokens, from mode latency\n"
        "  most tokens guessed at once\n"
        "  takes   1–16 tokens\n"
        "  default 2\n"
        "  only    where speculative mtp or draft\n"
        "  flag    --spec-draft-n-max\n"
        "ubatch: 512 tokens, from file\n"
        "  tokens computed at once; auto is 512, or the batch where that is less\n"
        "  takes   auto, 32–16,384 tokens\n"
        "  default auto\n"
        "  flag    --ubatch-size\n"
        "  passed  --ubatch-size 512\n"
        "gpu_layers: all layers, from default\n"
        "  layers on the device\n"
        "  takes   all, 0–999 layers\n"
        "  default all\n"
        "  only    where device other than none\n"
        "  flag    --gpu-layers\n"
        "  passed  --gpu-layers all\n"
    )
    assert list(answer(show, "turbo_4b", "top_k", "slots")["options"]) == ["top_k", "slots"]


@pytest.mark.parametrize(
    ("words", "first"),
    [
        (
            ("turbo_4b", "top_k"),
            "top_k: 20 tokens, from chain chat (the Qwen3.5 model card (4B and 9B agree), non-thinking, general)",
        ),
        (("turbo_4b", "top_k", "--set", "top_k=7"), "top_k: 7 tokens, from --set"),
        (
            ("turbo_4b", "temperature", "--set", "sampling=benchmark"),
            "temperature: 0.0, from chain benchmark (greedy: the likeliest token, nothing else)",
        ),
        (("tiny", "min_p"), "min_p: 0.05, from chain chat (llama.cpp's defaults at b11312)"),
        (("mine", "min_p"), "min_p: chain, from default"),  # whose header nobody has read
        (("tiny", "min_p", "--set", "kind=embedding"), "min_p: chain, from default"),
        (("tiny", "warm_prompt"), "warm_prompt: nothing, from default"),
        (("tiny", "max_wait"), "max_wait: 10m, from default"),
        (("tiny", "ttl", "--set", "ttl=90"), "ttl: 90s, from --set"),
        (("tiny", "aliases", "--set", "aliases=gpt-4o o"), "aliases: gpt-4o o, from --set"),
    ],
)
def test_show_resolves_the_chain_where_the_model_is_known(words: tuple[str, ...], first: str, home: paths.Home) -> None:
    (home.presets / "mine.yaml").write_text(GOOD)
    assert run(show, *words).stdout.splitlines()[0] == first


def test_show_of_no_option_names_the_nearest() -> None:
    with pytest.raises(Error, match="there is no option 'draft_lenght'") as raised:
        raise run(show, "turbo_4b", "draft_lenght").exception or AssertionError
    assert raised.value.hint == "llmctl show turbo_4b draft_length"
    with pytest.raises(Error) as raised:
        raise run(show, "turbo_4b", "zzz").exception or AssertionError
    assert raised.value.hint == "llmctl show turbo_4b"


# check


def test_check_says_ok_in_one_line(home: paths.Home) -> None:
    path = home.presets / "mine.yaml"
    path.write_text(GOOD + "contexts: {short: {context: 4096}}\nmodes: {fast: {slots: 2}}\n")
    assert run(check, str(path)).stdout == "ok: mine, m.gguf, 8192 tokens, 1 slot, 4 pairs of context and mode\n"
    assert answer(check, str(path))["pairs"] == [["", ""], ["", "fast"], ["short", ""], ["short", "fast"]]


def test_check_says_all_faults_at_once_each_with_its_line(home: paths.Home) -> None:
    path = home.presets / "mine.yaml"
    path.write_text(GOOD + "slots: 0\nzzz: 1\nmodes: {fast: {context: 1}}\n")
    done = run(check, str(path))
    assert done.return_value == 3
    assert done.stdout == ""
    assert done.stderr.splitlines()[::2] == [
        f"error: {path}:2: slots is '0', but should be a whole number from 1 to 256",
        f"error: {path}:3: 'zzz' is not an option",
        f"error: {path}:4: modes.fast.context is '1', but should be a whole number from 256 to 1048576",
    ]
    assert done.stderr.splitlines()[1] == "try: slots: 1"
    found = json.loads(run(check, str(path), "--json").stdout)
    assert (found["ok"], [fault["line"] for fault in found["faults"]]) == (False, [2, 3, 4])


def test_check_of_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.yaml")
    for path, says in {tmp_path / "x.yaml": "a pipe", Path("/dev/zero"): "a device", tmp_path: "a folder"}.items():
        assert run(check, str(path)).stderr.startswith(f"error: {path}:1: can't be read: it is {says}, not a file\n")
    assert run(check, "/no/such.yaml").stderr.startswith("error: /no/such.yaml:1: can't be read: No such file or directory\n")


# schema


class Core(yaml.SafeLoader):
    """YAML 1.2's core schema, which editors read: only true, false, null and numbers are no words."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012


for tag, pattern, first in (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("null", r"null|Null|NULL|~|", ["n", "N", "~", ""]),
    ("int", r"[-+]?[0-9]+", "-+0123456789"),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", "-+.0123456789"),
):
    Core.add_implicit_resolver(f"tag:yaml.org,2002:{tag}", re.compile(f"^(?:{pattern})$"), list(first))


def valid(text: str) -> bool:
    document = schema.document()
    return not list(jsonschema.Draft202012Validator(document).iter_errors(yaml.load(text, Core)))


def test_the_schema_is_one() -> None:
    document = json.loads(run(schema).stdout)
    jsonschema.Draft202012Validator.check_schema(document)
    assert set(options()) <= set(document["properties"])
    assert all("description" in each or "$ref" in each for each in document["properties"].values())


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_preset_is_valid(path: Path) -> None:
    assert valid(path.read_text())


@pytest.mark.parametrize(
    "text",
    [
        "flash_attention: off\nunified: on\nreasoning: off\n",
        "threads: auto\nbatch: 512\ntemperature: 0.5\ntop_p: 1\nmax_tokens: unlimited\n",
        "extra_args: [--prio, 2, --no-warmup]\n",
        "contexts: {short: {context: 4096, slots: 2}}\ndefault_context: short\nmodes: {fast: {slots: 2, fallback: []}}\n",
        "fallback: [{context: 4096, model: {path: /b.gguf}}, fewer_layers]\n",
        "speculative: draft\ndraft_model: {path: /d.gguf}\n",
        "kind: embedding\npooling: mean\nbatch: 512\nwarm_prompt: ''\n",
        "aliases: [gpt-4o, 'qwen/qwen3.5:4b', 4]\ndefault: on\nttl: 90\nhold: 0\nqueue: 0\n",
        "aliases: []\npin: on\nttl: off\nhold: 1m\nmax_wait: 1d\nwait_comments: off\ntruncate: oldest\n",
    ],
)
def test_what_the_reader_takes_the_schema_takes(text: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(GOOD + text)
    preset.read(path)
    assert valid(GOOD + text)


@pytest.mark.parametrize(
    "text",
    [
        "slots: 0\n",
        "slots: two\n",
        "slots: 1.5\n",
        "slot: 1\n",
        "flash_attention: false\n",
        "unified: true\n",
        "cache_type_k: q9_0\n",
        "temperature: hot\n",
        "extra_args: --prio\n",
        'about: "two\\nlines"\n',
        f"draft_model: {{file: m.gguf, sha256: {SHA}, hub: {{repository: a/b, revision: ../x}}}}\n",
        "contexts: {short: {slots: 2}}\n",
        "contexts: {8k: {context: 8192}}\n",
        "modes: {fast: {slots: 0}}\n",
        "modes: {fast: {modes: {}}}\n",
        "fallback: [less]\n",
        "fallback: [{}]\n",
        "fallback: [{kind: rerank}]\n",
        *(f"fallback: [{{{each}}}]\n" for each in ("aliases: [a]", "default: on", "ttl: 5m", "pin: on", "hold: 5", "queue: 5")),
        *(f"fallback: [{{{each}}}]\n" for each in ("max_wait: 5", "wait_comments: off", "truncate: oldest")),
        "aliases: gpt-4o\n",
        "aliases: [a b]\n",
        "aliases: [a, a]\n",
        "aliases: ['']\n",
        "ttl: 0\n",
        "ttl: 1.5h\n",
        "ttl: -5\n",
        "hold: 3601\n",
        "hold: off\n",
        "max_wait: 0\n",
        "queue: 100001\n",
        "default: true\n",
        "truncate: newest\n",
        "fallback: fewer_layers\n",
        "draft_model: {}\n",
        "draft_model: {path: /d.gguf, hub: {repository: a/b}, file: d.gguf, sha256: x}\n",
        "name: x\n",
    ],
)
def test_what_the_reader_refuses_the_schema_refuses(text: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(GOOD + text)
    with pytest.raises(Error):
        preset.read(path)
    assert not valid(GOOD + text)


# docs


def test_the_readmes_tables_are_made_from_the_declarations_and_the_files() -> None:
    table = docs.options()
    assert all(f"| `{name}` |" in table for name in (*options(), "model", "fallback", "contexts", "modes"))
    shipped = docs.presets()
    assert all(f"| `{path.stem}` |" in shipped for path in SHIPPED)
    assert "| Qwen3.5-4B-Q4_K_M, 2.6 GiB | 65,536 (short 16,384, long 131,072) | latency, throughput |" in shipped
    assert "| `turbo_4b` | an NVIDIA card with 8 GB (RTX 3070) that also draws a desktop |" in shipped
