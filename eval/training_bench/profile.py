"""Where a step's time goes: torch.profiler's own CPU time, by kind of operation."""

from __future__ import annotations

import re
from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile

# The first that matches an operation's name takes it.
KINDS = {
    "attention": r"scaled_dot_product|flash_attention",
    "matrix products": r"::(mm|bmm|addmm|baddbmm|linear|mkldnn_linear|matmul|addmv|dot)",
    "softmax, exp, log": r"softmax|logsumexp|::(exp|log|logaddexp|max|argmax|amax)_?$",
    "norms": r"rms_norm|layer_norm|rsqrt|::(mean|var|norm)$",
    "copies, casts, gathers": r"::(copy|cat|index|gather|clone|contiguous|to|_to_copy|embedding|pad|constant_pad|fill)"
    r"|::(zero|empty|new_|select|slice|scatter|masked|roll|repeat|resize|split|narrow|as_strided|view|reshape|transpose)"
    r"|::(t$|permute|expand|squeeze|unsqueeze|detach|alias|unbind|stack)",
    "reductions": r"::(sum|cumsum|cumprod|all|any|count)",
    "other arithmetic": r"aten::",
}
OTHER = "autograd, Python"


def profile_of(step: Callable[[], object], most: int = 15) -> dict:
    """kinds: seconds of each kind in one call, longest first; operations: the longest ones, with their calls."""
    with profile(activities=[ProfilerActivity.CPU]) as found:
        step()
    events = sorted(found.key_averages(), key=lambda event: -event.self_cpu_time_total)
    kinds: dict[str, float] = {}
    for event in events:
        kind = kind_of(event.key)
        kinds[kind] = kinds.get(kind, 0.0) + event.self_cpu_time_total / 1e6
    return {
        "kinds": dict(sorted(kinds.items(), key=lambda item: -item[1])),
        "operations": [[e.key, e.self_cpu_time_total / 1e6, e.count] for e in events[:most]],
    }


def kind_of(name: str) -> str:
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, name)), OTHER)
