"""Options that can't stand beside each other."""

from __future__ import annotations

from typing import Any

import pytest

from supervisor.model import Model
from supervisor.option import Options, options
from supervisor.rules import conflicts, idle

PLAIN = Model("plain.gguf", mtp=False)
UNSAID = Model("unsaid.gguf")
MTP = Model("mtp.gguf", mtp=True)
OWN = Model("own.gguf", path="/own.gguf")


@pytest.mark.parametrize(
    ("chosen", "model", "draft", "key", "message", "hint"),
    [
        (
            {"speculative": "draft"},
            PLAIN,
            None,
            "speculative",
            "speculative is draft, but there is no draft_model",
            "add draft_model: or speculative: off",
        ),
        ({}, PLAIN, MTP, "draft_model", "draft_model is mtp.gguf, but speculative is off", "speculative: draft"),
        (
            {"speculative": "mtp"},
            PLAIN,
            None,
            "speculative",
            "speculative is mtp, but mtp of plain.gguf is no",
            "a file with an MTP head, and mtp: yes",
        ),
        (
            {"speculative": "mtp"},
            UNSAID,
            None,
            "speculative",
            "speculative is mtp, but mtp of unsaid.gguf is left out",
            "a file with an MTP head, and mtp: yes",
        ),
        (
            {"speculative": "ngram", "kind": "embedding"},
            PLAIN,
            None,
            "speculative",
            "speculative is ngram, but kind is embedding, which decodes nothing",
            "speculative: off",
        ),
        (
            {"speculative": "ngram", "speculative_next": ("draft",)},
            PLAIN,
            None,
            "speculative_next",
            "speculative_next has draft, but there is no draft_model",
            "add draft_model: or leave it out",
        ),
        (
            {"speculative": "ngram", "speculative_next": ("mtp",)},
            PLAIN,
            None,
            "speculative_next",
            "speculative_next has mtp, but mtp of plain.gguf is no",
            "a file with an MTP head, and mtp: yes",
        ),
        (
            {"speculative": "mtp", "speculative_next": ("off", "ngram")},
            MTP,
            None,
            "speculative_next",
            "speculative_next is off ngram, but nothing is guessed with off, so nothing comes after it",
            "move off to the end, or leave it out",
        ),
        (
            {"batch": 256, "ubatch": 512},
            PLAIN,
            None,
            "batch",
            "batch is 256, but ubatch is 512, and a batch bounds it",
            "batch: 512",
        ),
        (
            {"batch": 1024, "ubatch": 512, "kind": "embedding"},
            PLAIN,
            None,
            "batch",
            "batch is 1024, but ubatch is 512, and an embedding server takes a text in one ubatch",
            "batch: 512",
        ),
        (
            {"batch": 1024, "ubatch": 512, "kind": "rerank"},
            PLAIN,
            None,
            "batch",
            "batch is 1024, but ubatch is 512, and a rerank server takes a text in one ubatch",
            "batch: 512",
        ),
        (
            {"context": 1000, "slots": 4},
            PLAIN,
            None,
            "context",
            "context is 1000, but 4 slots need at least 256 tokens each",
            "context: 1024",
        ),
        (
            {"cache_type_v": "q8_0", "flash_attention": "off"},
            PLAIN,
            None,
            "cache_type_v",
            "cache_type_v is q8_0, but flash_attention is off, and a quantised V cache needs it",
            "flash_attention: on",
        ),
        (
            {"pooling": "mean", "kind": "rerank"},
            PLAIN,
            None,
            "pooling",
            "pooling is mean, but kind is rerank, which needs rank",
            "pooling: rank",
        ),
        (
            {"warm_prompt": "Hi", "kind": "rerank"},
            PLAIN,
            None,
            "warm_prompt",
            "warm_prompt is given, but kind is rerank, which has no system prompt",
            "leave it out",
        ),
        (
            {"pin": True, "ttl": 5_400},
            PLAIN,
            None,
            "ttl",
            "ttl is 90m, but pin is on, and what is pinned stays loaded",
            "ttl: off",
        ),
    ],
)
def test_each_conflict_has_its_sentence(
    chosen: dict[str, Any], model: Model, draft: Model | None, key: str, message: str, hint: str
) -> None:
    (found,) = conflicts(Options(**chosen), model, draft)
    assert (found.key, found.message, found.hint) == (key, message, hint)


@pytest.mark.parametrize(
    ("chosen", "model", "draft"),
    [
        ({}, PLAIN, None),
        ({"speculative": "mtp"}, MTP, None),
        ({"speculative": "mtp"}, OWN, None),  # its header says, once it is read
        ({"speculative": "draft"}, PLAIN, UNSAID),
        ({"speculative": "ngram", "speculative_next": ("draft",)}, PLAIN, UNSAID),
        ({"speculative": "mtp", "speculative_next": ("mtp", "ngram", "off")}, MTP, None),
        ({"speculative": "off", "speculative_next": ("mtp", "draft")}, PLAIN, None),  # idle: one of the file's modes may guess
        ({"batch": 512, "ubatch": 512, "kind": "embedding", "pooling": "mean"}, PLAIN, None),
        ({"batch": 64}, PLAIN, None),  # an auto ubatch is no more than the batch
        ({"batch": 2048, "kind": "embedding"}, PLAIN, None),
        ({"ubatch": 4096}, PLAIN, None),  # and an auto batch no less than the ubatch
        ({"ubatch": 4096, "kind": "rerank"}, PLAIN, None),
        ({"pooling": "mean", "gpu_layers": 20}, PLAIN, None),  # idle, which a file may leave it
        ({"context": 1024, "slots": 4}, PLAIN, None),
        ({"pin": True}, PLAIN, None),
        ({"ttl": 600}, PLAIN, None),
        ({"cache_type_k": "q8_0", "flash_attention": "off"}, PLAIN, None),
        ({"cache_type_v": "q8_0"}, PLAIN, None),
        ({"gpu_layers": 20, "device": "CUDA0"}, PLAIN, None),
    ],
)
def test_what_goes_together(chosen: dict[str, Any], model: Model, draft: Model | None) -> None:
    assert list(conflicts(Options(**chosen), model, draft)) == []


@pytest.mark.parametrize(
    ("name", "chosen", "message", "hint"),
    [
        ("gpu_layers", {"gpu_layers": 20}, "gpu_layers is 20, but device is none, so it doesn't count", "device: CUDA0"),
        ("pooling", {"pooling": "cls"}, "pooling is cls, but kind is chat, so it doesn't count", "kind: embedding"),
        (
            "draft_length",
            {"speculative": "ngram"},
            "draft_length is 2, but speculative is ngram, so it doesn't count",
            "speculative: mtp",
        ),
        (
            "speculative_next",
            {"speculative_next": ("mtp", "off")},
            "speculative_next is mtp off, but speculative is off, so it doesn't count",
            "speculative: mtp",
        ),
        ("reasoning_budget", {}, "reasoning_budget is unlimited, but reasoning is off, so it doesn't count", "reasoning: on"),
        ("reasoning", {"kind": "rerank"}, "reasoning is off, but kind is rerank, so it doesn't count", "kind: chat"),
        (
            "truncate",
            {"kind": "embedding", "truncate": "oldest"},
            "truncate is oldest, but kind is embedding, so it doesn't count",
            "kind: chat",
        ),
    ],
)
def test_what_keeps_an_option_from_counting(name: str, chosen: dict[str, Any], message: str, hint: str) -> None:
    found = idle(options()[name], Options(**chosen))
    assert found is not None
    assert (found.key, found.message, found.hint) == (name, message, hint)


@pytest.mark.parametrize(
    ("name", "chosen"),
    [
        ("gpu_layers", {"device": "CUDA0"}),
        ("pooling", {"kind": "rerank"}),
        ("draft_length", {"speculative": "draft"}),
        ("draft_length", {"speculative": "ngram", "speculative_next": ("draft",)}),  # it may come to that
        ("speculative_next", {"speculative": "ngram"}),
        ("slots", {}),
    ],
)
def test_what_counts_is_not_idle(name: str, chosen: dict[str, Any]) -> None:
    assert idle(options()[name], Options(**chosen)) is None
