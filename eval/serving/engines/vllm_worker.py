"""Greedy decoding by vLLM with an exported head, run by vLLM's own Python:  PYTHON vllm_worker.py JOB.json RESULT.json

Beside texts and vLLM's own counters it keeps every draft that a verify call was given (eval.serving.engine says how).
Imports nothing of Eyrie, so that it runs where Eyrie is not installed.
"""

import json
import os
import sys
import time

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the scheduler must be in this process to be looked at
os.environ["VLLM_NO_USAGE_STATS"] = "1"


def watch(scheduler):
    """Collects, per request, [tokens emitted before, drafts] of every verify call as the scheduler sees it."""
    rounds, emitted = {}, {}
    update = scheduler.update_from_output

    def watched(scheduled, output):
        for request, row in output.req_id_to_index.items():
            drafts = scheduled.scheduled_spec_decode_tokens.get(request)
            if drafts:
                rounds.setdefault(request, []).append([emitted.get(request, 0), list(drafts)])
            new = output.sampled_token_ids[row] if output.sampled_token_ids else []
            emitted[request] = emitted.get(request, 0) + len(new)
        return update(scheduled, output)

    scheduler.update_from_output = watched
    return rounds


def main(job_file, result_file):
    with open(job_file) as file:
        job = json.load(file)
    import torch
    import vllm
    from vllm import LLM, SamplingParams

    torch.set_num_threads(job["threads"])
    drafting = None
    if job["head"]:
        method = {"eagle1": "eagle"}.get(job["method"], job["method"])
        drafting = {"method": method, "model": job["head"], "num_speculative_tokens": job["depth"]}
    longest = max(map(len, job["prompts"])) + job["max_new_tokens"]
    llm = LLM(
        job["verifier"],
        speculative_config=drafting,
        dtype=job["dtype"],
        max_model_len=longest + 2 * (job["depth"] + 1),
        max_num_seqs=job.get("batch", 1),
        enforce_eager=True,
        async_scheduling=False,  # else drafts reach the scheduler as placeholders
        enable_prefix_caching=False,
        disable_log_stats=False,
        seed=0,
    )
    core = llm.llm_engine.engine_core.engine_core
    rounds = watch(core.scheduler)
    # The stop token is kept, and ids beyond the generation config's are named by the job.
    sampling = SamplingParams(temperature=0, max_tokens=job["max_new_tokens"], stop_token_ids=job["stop_ids"])
    begun = time.perf_counter()
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in job["prompts"]], sampling)
    seconds = time.perf_counter() - begun
    counters = {m.name: getattr(m, "value", getattr(m, "values", None)) for m in llm.get_metrics()}

    def counted(name):
        return counters.get(f"vllm:spec_decode_num_{name}", 0)

    # Inside, requests are called by the caller's id and a suffix; they end in the order in which they were given.
    of_request = [[r for name, r in rounds.items() if name.split("-")[0] == output.request_id] for output in outputs]
    result = {
        "engine": f"vllm {vllm.__version__}",
        "texts": [list(output.outputs[0].token_ids) for output in outputs],
        "verify_calls": counted("drafts"),
        "drafted": counted("draft_tokens"),
        "accepted": counted("accepted_tokens"),
        "accepted_by_position": counters.get("vllm:spec_decode_num_accepted_tokens_per_pos"),
        "rounds": [found[0] if found else [] for found in of_request] if drafting else None,
        "seconds": seconds,
    }
    with open(result_file, "w") as file:
        json.dump(result, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
