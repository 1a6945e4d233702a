"""What a fresh child is asked before it is called ready: memory that was promised is really taken only by the first decode.

A chat model decodes. On the CPU 8 tokens do; on a card the prompt is as long as one computed batch, since that is where the largest
buffers and the kernels' first use are (llama.cpp#23903: out of memory in the first decode after /health said ok), and the answer
is long enough for one draft to be made and checked. An embedding or rerank model does one of its own requests.

A preset's ``warm_prompt`` is then evaluated as a system message, by the route that clients use, so that their first request finds it
in the cache. The engine sets its checkpoint where the user's turn begins, which is what a recurrent model needs to reuse it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from supervisor.preset import Preset

CPU_TOKENS: Final = 8
_TOKEN: Final = 1
"""Any token id: every vocabulary has it, and what it says doesn't matter."""


@dataclass(frozen=True, slots=True)
class Question:
    """One request of a warm-up: a route of the engine and its JSON body."""

    path: str
    body: dict[str, Any]
    about: str
    """What it evaluates, in a refusal's words."""
    hint: str
    """What to try when it is refused as a fault of the request."""


def questions(preset: Preset) -> tuple[Question, ...]:
    """What to ask, in order; the last leaves its prompt in the cache of the slot that the first client gets."""
    if preset.kind == "embedding":
        return (Question("/v1/embeddings", {"input": "Hello"}, "its warm-up", "--set pooling=mean"),)
    if preset.kind == "rerank":
        return (Question("/v1/rerank", {"query": "Hello", "documents": ["Hello"]}, "its warm-up", "a rerank model"),)
    if preset.device == "none":
        prompt, answer = CPU_TOKENS, CPU_TOKENS
    else:
        draft = 0 if preset.speculative == "off" else preset.draft_length
        answer = draft + 2
        prompt = min(int(preset.ubatch), preset.slot_context - answer)
    body = {"prompt": [_TOKEN] * prompt, "n_predict": answer, "ignore_eos": True, "cache_prompt": False}
    first = Question("/completion", body, "its warm-up", f"llmctl show {preset.name}")
    if not preset.warm_prompt:
        return (first,)
    messages = [{"role": "system", "content": preset.warm_prompt}, {"role": "user", "content": "Hello"}]
    return (
        first,
        Question(
            "/v1/chat/completions",
            {"messages": messages, "max_tokens": 1},
            "its warm_prompt",
            "a shorter warm_prompt, or more context",
        ),
    )
