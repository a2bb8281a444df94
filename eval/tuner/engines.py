"""What serving engines can do, what they call it, and who says so. Read on `READ`; nothing here is guessed.

A family that isn't listed was not found in what was read. `since`: the version it was seen in; an older one is "not
verified", unless `lacks` names it. In `how` and `tree`, $N stands for drafts, $L for levels, $K for children, $M for
nodes, $ROWS for rows of the verify.
"""

from __future__ import annotations

from dataclasses import dataclass
from string import Template

READ = "2026-12-03"
FAMILIES = {
    "eagle3": "EAGLE-3",
    "eagle2": "EAGLE-2 (EAGLE-1's head, dynamic tree)",
    "eagle1": "EAGLE-1",
    "medusa": "Medusa",
    "independent": "independent small draft",
    "prompt_lookup": "prompt lookup",
    "lookahead": "Lookahead",
}


@dataclass(frozen=True)
class Support:
    """One family in one engine. tree: its flags for a dynamic tree; None: chains alone. lacks: versions without it."""

    how: str
    source: str
    since: str | None = None
    tree: str | None = None
    lacks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Engine:
    """rollback: how rejected drafts leave the caches; None: not verified. version: the one that was looked at."""

    name: str
    version: str | None
    families: dict[str, Support]
    rollback: str | None
    rollback_source: str = ""
    metrics: tuple[str, ...] = ()
    metrics_how: str = "not verified"
    tau: str = "tokens handed out / verify calls"
    remark: str = ""


HERE = "served here (docs/serving.md)"
VLLM = "vLLM 0.32's sources, vllm/config/speculative.py"
SGLANG = "SGLang's docs, advanced_features/speculative_decoding.md"
TRTLLM = "TensorRT-LLM's docs, features/speculative-decoding.md"
TRTLLM_OLD = "TensorRT-LLM 0.18's docs, advanced/speculative-decoding.html, and its converters (docs/serving.md)"
LLAMACPP = "llama.cpp 11434's sources, common/speculative.cpp"
OPENVINO = "OpenVINO GenAI 2026.4's GenerationConfig"
HF = "transformers 5.24's sources, generation/utils.py"
OURS = "eval/speculative"
TREE = "run=DIR decode=tree decode.depth=$L decode.branch=$K decode.total_tokens=$ROWS"


def _vllm(method: str, source: str, model: bool = True, **options) -> Support:
    middle = ', "model": "DIR"' if model else ', "prompt_lookup_max": 3'
    how = f"""--speculative-config '{{"method": "{method}"{middle}, "num_speculative_tokens": $N}}'"""
    return Support(how, source, **options)


def _sglang(algorithm: str, model: bool = True, tree: bool = True) -> Support:
    how = f"--speculative-algorithm {algorithm}" + (" --speculative-draft-model-path DIR" if model else "")
    shape = " --speculative-num-steps {} --speculative-eagle-topk {} --speculative-num-draft-tokens {}"
    if not model:
        return Support(how, SGLANG)
    return Support(
        how + shape.format("$N", 1, "$ROWS"), SGLANG, tree=how + shape.format("$L", "$K", "$ROWS") if tree else None
    )


ENGINES = {
    "vllm": Engine(
        "vLLM",
        "0.32",
        {
            "eagle3": _vllm("eagle3", HERE, since="0.32"),
            "eagle1": _vllm("eagle", HERE, since="0.32"),
            "medusa": _vllm("medusa", HERE, since="0.32"),
            "independent": _vllm("draft_model", "vLLM's docs, 0.25 (has it) and 0.14 (0.10 lacks it)", since="0.25",
                                 lacks=("0.10",)),
            "prompt_lookup": _vllm("ngram", VLLM, model=False, since="0.32"),
        },
        "logical length: num_computed_tokens goes back by the rejected drafts; the next call overwrites them",
        "vLLM 0.32's sources, vllm/v1/core/sched/scheduler.py",
        (
            "vllm:spec_decode_num_drafts_total",
            "vllm:spec_decode_num_draft_tokens_total",
            "vllm:spec_decode_num_accepted_tokens_total",
            "vllm:spec_decode_num_accepted_tokens_per_pos_total",
        ),
        "/metrics has them by default (not with --disable-log-stats); --per-request-spec-decode-metrics summary adds "
        "them to each answer (docs of 0.32)",
        tau="1 + accepted / drafts; n-alpha of position k: per_pos[k] / per_pos[k-1], of the first per_pos[0] / drafts",
        remark="no trees in 0.32; rejection_sample_method=synthetic accepts without looking: lossy",
    ),
    "sglang": Engine(
        "SGLang",
        None,
        {
            "eagle3": _sglang("EAGLE3"),
            "eagle2": _sglang("EAGLE"),
            "eagle1": _sglang("EAGLE", tree=False),
            "independent": _sglang("STANDALONE", tree=False),
            "prompt_lookup": _sglang("NGRAM", model=False),
        },
        "scratch and commit: every row of the verify gets a slot, those of rejected rows are freed (evict_mask)",
        "SGLang's sources, srt/speculative",
        ("sglang:spec_accept_length", "sglang:spec_verify_calls_total", "sglang:generation_tokens_total"),
        "--enable-metrics; /metrics has no acceptance by position",
        tau="sglang:spec_accept_length; one acceptance for all depths from it",
        remark="keep --speculative-accept-threshold-single and -acc at 1.0: lower ones are lossy",
    ),
    "tensorrt_llm": Engine(
        "TensorRT-LLM",
        None,
        {
            "eagle3": Support("decoding_type: Eagle3, max_draft_len: $N, speculative_model: DIR", TRTLLM,
                              tree="decoding_type: Eagle3, max_draft_len: $L, use_dynamic_tree: true, "
                              "dynamic_tree_max_topK: $K, max_total_draft_tokens: $M, speculative_model: DIR"),
            "independent": Support("decoding_type: DraftTarget, max_draft_len: $N, speculative_model: DIR", TRTLLM),
            "prompt_lookup": Support("decoding_type: NGram, max_draft_len: $N", TRTLLM),
            "medusa": Support("TensorRT backend: --medusa_model_dir DIR --num_medusa_heads $N", TRTLLM_OLD),
            "lookahead": Support("TensorRT backend", TRTLLM_OLD),
        },
        None,
        metrics_how="not verified: compare generation steps with tokens handed out",
        remark="speculation can't be switched off by load, its docs say; relaxed acceptance for thinking is lossy",
    ),
    "llamacpp": Engine(
        "llama.cpp",
        "11434",
        {
            "eagle3": Support("-md DIR/head.gguf --spec-type draft-eagle3 --spec-draft-n-max $N", HERE, since="11434"),
            "independent": Support("-md DRAFT.gguf --spec-type draft-simple --spec-draft-n-max $N", LLAMACPP, "11434"),
            "prompt_lookup": Support("--spec-type ngram-simple", LLAMACPP, since="11434"),
        },
        "logical length: llama_memory_seq_rm cuts the cells of rejected drafts; models that can only be cut whole are "
        "saved before and loaded after each round, others are not drafted for",
        "llama.cpp 11434's sources, tools/server/server-context.cpp",
        (
            "llamacpp:spec_decode_num_drafts_total",
            "llamacpp:spec_decode_num_draft_tokens_total",
            "llamacpp:spec_decode_num_accepted_tokens_total",
            "llamacpp:spec_decode_num_accepted_tokens_per_pos_total",
        ),
        "--metrics; each answer has timings.draft_n and draft_n_accepted",
        tau="1 + accepted / drafts; n-alpha of position k: per_pos[k] / per_pos[k-1], of the first per_pos[0] / drafts",
        remark="no trees for heads",
    ),
    "openvino": Engine(
        "OpenVINO GenAI",
        "2026.4",
        {
            "eagle3": Support("draft_model=draft_model(DIR/ir, DEVICE), num_assistant_tokens=$N", HERE, since="2026.4",
                              tree="draft_model=draft_model(DIR/ir, DEVICE), tree_depth=$L, branching_factor=$K, "
                              "num_assistant_tokens=$M"),
            "independent": Support("draft_model=draft_model(DIR, DEVICE), num_assistant_tokens=$N", OPENVINO, "2026.4"),
            "prompt_lookup": Support("prompt_lookup=True, num_assistant_tokens=$N", OPENVINO, "2026.4"),
        },
        None,
        metrics=("extended_perf_metrics.get_num_draft_tokens", "extended_perf_metrics.get_num_accepted_tokens"),
        metrics_how="of each answer; none by position",
        tau="1 + accepted / (drafted / N)",
        remark="its tree search was not run here",
    ),
    "transformers": Engine(
        "transformers",
        "5.24",
        {
            "independent": Support("generate(assistant_model=..., num_assistant_tokens=$N)", HF, since="5.24"),
            "prompt_lookup": Support("generate(prompt_lookup_num_tokens=$N)", HF, since="5.24"),
        },
        "logical length: cache.crop cuts rejected drafts",
        HF,
        metrics_how="none: count calls of the model's forward",
        remark="one sequence at a time",
    ),
    "eyrie": Engine(
        "Eyrie's own loop",
        "of this copy",
        {
            "eagle3": Support("run=DIR decode=chain decode.depth=$N", OURS, tree=TREE),
            "eagle2": Support("", OURS, tree=TREE),
            "eagle1": Support("run=DIR decode=chain decode.depth=$N", OURS),
            "medusa": Support("run=DIR decode=chain decode.depth=$N", OURS),
            "independent": Support("draft=MODEL decode.depth=$N", OURS),
            "prompt_lookup": Support("draft=prompt_lookup decode.depth=$N", OURS),
            "lookahead": Support("draft=lookahead", OURS),
        },
        "logical length: the cache's length of each sequence goes back, nothing is copied; of a tree the accepted "
        "path's rows are moved together first",
        "models/cache.py",
        ("alpha.json: alpha_by_depth, tau, times",),
        "python -m eval run=DIR",
        tau="tau, as it stands there",
        remark="a reference, not a server",
    ),
    "other": Engine("another engine", None, {}, None, remark="nothing is known of it"),
}  # fmt: skip


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.lstrip("v").split(".") if part.isdecimal())


def availability(engine: Engine, family: str, version: str | None) -> tuple[bool, str]:
    """Whether this version has the family, and in words how sure that is."""
    support = engine.families.get(family)
    if support is None:
        return False, f"not found in {engine.name}"
    version = version or engine.version
    if support.source == OURS:
        return True, support.source
    if version is None or support.since is None:
        return True, f"{support.source}; the version is not verified"
    if any(_version(version)[: len(_version(old))] == _version(old) for old in support.lacks):
        return False, f"{engine.name} {version} lacks it ({support.source})"
    if _version(version) < _version(support.since):
        return True, f"seen in {support.since}, not verified for {version} ({support.source})"
    return True, support.source


def flags(support: Support, depth: int, nodes: int | None = None, branch: int = 1) -> str:
    """The engine's own words for a chain of `depth`, or a tree of that many levels and `nodes`."""
    rows = (depth if nodes is None else nodes) + 1
    text = support.how if nodes is None else support.tree or ""
    return Template(text).safe_substitute(N=depth, L=depth, K=branch, M=nodes, ROWS=rows)
