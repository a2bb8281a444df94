"""Greedy decoding by OpenVINO GenAI with an exported head, run by its own Python:
PYTHON openvino_worker.py JOB.json RESULT.json

Models are OpenVINO IR: a folder with `openvino_model.xml`, in it or in its `ir/`. Any other verifier is converted by
the environment's optimum-cli first, uncompressed. Verify calls and what each
accepted are counted from the tokens that it hands out; the number of drafted tokens is the engine's own. (Its number of
accepted ones leaves out those of a call that ends the text.) Which tokens were drafted it doesn't tell. Imports nothing
of Eyrie.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def ir(folder):
    """The IR folder that `folder` is or holds; None when it is neither."""
    places = (Path(folder), Path(folder) / "ir")
    return next((str(place) for place in places if (place / "openvino_model.xml").is_file()), None)


def convert(folder, out):
    """`folder`, of a transformers model, as IR in `out`."""
    command = [str(Path(sys.executable).with_name("optimum-cli")), "export", "openvino", "--model", str(folder)]
    command += ["--task", "text-generation-with-past", "--weight-format", "fp32", out]
    subprocess.run(command, check=True, env=os.environ | {"HF_HUB_OFFLINE": "1"})
    return out


def main(job_file, result_file):
    job = json.loads(Path(job_file).read_text())
    import numpy
    import openvino
    import openvino_genai

    head = job["head"] and ir(job["head"])
    if job["head"] and (job["method"] != "eagle3" or not head):
        sys.exit(f"expected an EAGLE-3 head as OpenVINO IR, found {job['method']} in {job['head']}: export it again")

    class Steps(openvino_genai.StreamerBase):
        """How many tokens each call of the verifier gave: the accepted drafts and its own."""

        def __init__(self):
            super().__init__()
            self.sizes = []

        def write(self, tokens):
            self.sizes.append(1 if isinstance(tokens, int) else len(tokens))
            return openvino_genai.StreamingStatus.RUNNING

        def end(self):
            pass

    # Without these the CPU may multiply in bfloat16 and keeps keys and values in 8 or 16 bits.
    precision = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}[job["dtype"]]
    settings = {"INFERENCE_PRECISION_HINT": precision, "KV_CACHE_PRECISION": precision}
    settings["INFERENCE_NUM_THREADS"] = job["threads"]
    scheduler = openvino_genai.SchedulerConfig()  # both pipelines alike: paged attention
    scheduler.enable_prefix_caching = False
    scheduler.max_num_batched_tokens = 2**31
    scheduler.cache_size = 1  # GB
    drafting = {"draft_model": openvino_genai.draft_model(head, "CPU", **settings)} if head else {}
    with tempfile.TemporaryDirectory() as work:
        verifier = ir(job["verifier"]) or convert(job["verifier"], work)
        pipeline = openvino_genai.LLMPipeline(verifier, "CPU", scheduler_config=scheduler, **settings, **drafting)
    asked = {"num_assistant_tokens": job["depth"]} if head else {}
    config = openvino_genai.GenerationConfig(max_new_tokens=job["max_new_tokens"], do_sample=False, **asked)
    config.stop_token_ids = set(job["stop_ids"])
    if job["stop_ids"]:
        config.eos_token_id = job["stop_ids"][0]
    else:
        config.ignore_eos = True
    texts, calls, drafted = [], [], 0
    begun = time.perf_counter()
    for ids in job["prompts"]:
        steps = Steps()
        answer = pipeline.generate(openvino.Tensor(numpy.array([ids], dtype=numpy.int64)), config, steps)
        texts.append([int(token) for token in answer.tokens[0]])
        calls += steps.sizes[1:]  # the first is the prompt's
        if head:
            drafted += answer.extended_perf_metrics.get_num_draft_tokens()
    seconds = time.perf_counter() - begun
    result = {
        "engine": f"openvino-genai {openvino_genai.__version__}",
        "texts": texts,
        "verify_calls": len(calls) if head else 0,
        "drafted": drafted,
        "accepted": sum(calls) - len(calls) if head else 0,
        "accepted_by_position": [sum(size > n for size in calls) for n in range(1, job["depth"] + 1)] if head else None,
        "rounds": None,
        "seconds": seconds,
    }
    Path(result_file).write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
