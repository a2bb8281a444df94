"""Greedy decoding by llama.cpp's server with an EAGLE-3 head:  PYTHON llamacpp_worker.py JOB.json RESULT.json

The job (eval.serving.engine says what is in it) also names the server, "program"; its verifier and head are GGUF files,
or folders with one. Any Python will do: nothing but the standard library is imported. Counters are those of /metrics;
the drafts of each verify call are told by the debug log alone, which is kept beside the result as llama-server.log.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

CACHE = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
CANDIDATE = re.compile(r"draft candidate +0, pos +(\d+): +(\d+) ")
LAUNCH = re.compile(r"task -1 \| launching slot")
DRAFT = re.compile(r"generate_draft: id=-?\d+, .*#draft=(\d+),")
ADDED = re.compile(r"add accepted tokens: .*ids\.size=(\d+),")
EOG = re.compile(r"EOG token += (\d+) ")


def gguf(path):
    """The file itself, or the only .gguf file in a folder."""
    if not os.path.isdir(path):
        return path
    [name] = [name for name in os.listdir(path) if name.endswith(".gguf")]
    return os.path.join(path, name)


def command(job, port):
    """The server's command line: one text at a time, nothing kept between prompts, caches in the job's dtype."""
    threads, cache = str(job["threads"]), CACHE[job["dtype"]]
    context = max(map(len, job["prompts"])) + job["max_new_tokens"] + 2 * (job["depth"] + 2)
    words = [job["program"], "-m", gguf(job["verifier"]), "--host", "127.0.0.1", "--port", str(port)]
    words += ["-np", "1", "-c", str(context), "-t", threads, "-tb", threads, "-fa", "off", "-ctk", cache, "-ctv", cache]
    words += ["--cache-ram", "0", "--no-warmup", "--metrics", "--log-verbosity", "5"]
    if job["head"]:
        depth = str(job["depth"])
        words += ["--spec-type", "draft-eagle3", "-md", gguf(job["head"])]
        words += ["--spec-draft-n-max", depth, "--spec-draft-n-min", depth, "--spec-draft-p-min", "0"]
        words += ["-td", threads, "-tbd", threads, "-ctkd", cache, "-ctvd", cache]
    return words


def ask(port, path, body=None):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, {"Content-Type": "application/json"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request) as answer:
        return answer.read().decode()


def wait(server, port, patience=300):
    """Until the models are loaded."""
    end = time.monotonic() + patience
    while time.monotonic() < end:
        if server.poll() is not None:
            sys.exit(f"llama-server ended with {server.returncode} while loading; see llama-server.log")
        try:
            return ask(port, "/health")
        except (urllib.error.URLError, ConnectionError):  # not listening yet, or 503 while it loads
            time.sleep(0.2)
    sys.exit(f"llama-server was not ready within {patience} s; see llama-server.log")


def stop(server):
    """As Ctrl-C does, so that the log is written out."""
    server.send_signal(signal.SIGINT)
    try:
        server.wait(60)
    except subprocess.TimeoutExpired:
        server.kill()


def counters(text):
    """The speculative counters of /metrics by their names' middle; positions as a list."""
    found, positions = {}, {}
    for name, position, value in re.findall(
        r'^llamacpp:spec_decode_num_(\w+)_total(?:\{position="(\d+)"\})? (\d+)', text, re.M
    ):
        if position:
            positions[int(position)] = int(value)
        else:
            found[name] = int(value)
    return found, [positions[n] for n in sorted(positions)] or None


def rounds(lines):
    """Of each prompt, [tokens emitted before, drafts] of every verify call. One slot: lines come in order."""
    prompts, drafts = [], {}
    for line in lines:
        if LAUNCH.search(line):
            prompts.append([])
            emitted = 1  # the prefill's token
        elif match := CANDIDATE.search(line):
            position, token = map(int, match.groups())
            drafts = {position: token} if position == 0 else drafts | {position: token}
        elif match := DRAFT.search(line):
            # Fewer than were drafted where the text would grow too long.
            if int(match[1]):
                prompts[-1].append([emitted, [drafts[n] for n in range(int(match[1]))]])
        elif match := ADDED.search(line):
            emitted += int(match[1])
    return prompts


def main(job_file, result_file):
    with open(job_file) as file:
        job = json.load(file)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = os.path.join(os.path.dirname(os.path.abspath(result_file)), "llama-server.log")
    with open(log, "w") as stream:
        server = subprocess.Popen(command(job, port), stdout=stream, stderr=subprocess.STDOUT)
    try:
        wait(server, port)
        version = json.loads(ask(port, "/props"))["build_info"]
        settings = {"temperature": 0, "n_predict": job["max_new_tokens"], "cache_prompt": False, "return_tokens": True}
        begun = time.perf_counter()
        answers = [json.loads(ask(port, "/completion", {"prompt": ids} | settings)) for ids in job["prompts"]]
        seconds = time.perf_counter() - begun
        found, by_position = counters(ask(port, "/metrics"))
    except (urllib.error.URLError, ConnectionError) as error:
        sys.exit(f"llama-server failed at a request ({error}); see {log}")
    finally:
        stop(server)
    with open(log, errors="replace") as stream:
        lines = stream.readlines()
    ends = {int(match[1]) for line in lines if (match := EOG.search(line))}
    if missing := set(job["stop_ids"]) - ends:
        sys.exit(
            f"llama.cpp ends texts at {sorted(ends)}, and not at {sorted(missing)}: another vocabulary in the GGUF?"
        )
    result = {
        "engine": f"llama.cpp {version}",
        "texts": [answer["tokens"] for answer in answers],
        "verify_calls": found.get("drafts", 0),
        "drafted": found.get("draft_tokens", 0),
        "accepted": found.get("accepted_tokens", 0),
        "accepted_by_position": by_position,
        "rounds": rounds(lines) if job["head"] else None,
        "seconds": seconds,
    }
    with open(result_file, "w") as file:
        json.dump(result, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
