"""OpenVINO's worker with a stand-in for the engine: what it asks, and what it counts."""

import json
import sys
from types import SimpleNamespace

import pytest

from eval.serving.engines import openvino_worker

CALLS = [[7], [5, 6, 8], 4, [3, 9]]  # tokens handed out by the prompt, then by each verify call


class Pipeline:
    asked = []

    def __init__(self, verifier, device, **settings):
        Pipeline.asked.append((verifier, settings))

    def generate(self, tensor, config, streamer):
        Pipeline.asked.append((tensor.tolist(), vars(config)))
        for tokens in CALLS:
            streamer.write(tokens)
        text = [token for tokens in CALLS for token in (tokens if isinstance(tokens, list) else [tokens])]
        metrics = SimpleNamespace(get_num_draft_tokens=lambda: 6)
        return SimpleNamespace(tokens=[text], extended_perf_metrics=metrics)


class Settings:
    def __init__(self, **values):
        vars(self).update(values)


@pytest.fixture
def run(tmp_path, monkeypatch):
    engine = SimpleNamespace(
        LLMPipeline=Pipeline,
        StreamerBase=object,
        StreamingStatus=SimpleNamespace(RUNNING="on"),
        SchedulerConfig=Settings,
        GenerationConfig=Settings,
        draft_model=lambda place, device, **settings: ("draft", place),
        __version__="1",
    )
    monkeypatch.setitem(sys.modules, "openvino_genai", engine)
    monkeypatch.setitem(sys.modules, "openvino", SimpleNamespace(Tensor=lambda values: values))
    monkeypatch.setattr(Pipeline, "asked", [])
    for place in ("verifier", "head/ir"):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "openvino_model.xml").write_text("")

    def call(**changes):
        job = {"verifier": str(tmp_path / "verifier"), "head": str(tmp_path / "head"), "method": "eagle3", "depth": 3}
        job |= {"prompts": [[1, 2], [3]], "max_new_tokens": 8, "stop_ids": [9], "dtype": "float32", "threads": 1}
        (tmp_path / "job.json").write_text(json.dumps(job | changes))
        openvino_worker.main(tmp_path / "job.json", tmp_path / "result.json")
        return json.loads((tmp_path / "result.json").read_text())

    return call


def test_calls_are_counted_from_what_is_handed_out(run, tmp_path):
    found = run()
    assert found["texts"] == [[7, 5, 6, 8, 4, 3, 9]] * 2
    assert found["verify_calls"] == 6 and found["drafted"] == 12 and found["accepted"] == 2 * (2 + 0 + 1)
    assert found["accepted_by_position"] == [4, 2, 0] and found["rounds"] is None
    [(_, settings), (ids, config), _] = Pipeline.asked
    assert ids == [[1, 2]] and config["num_assistant_tokens"] == 3 and config["stop_token_ids"] == {9}
    assert settings["draft_model"] == ("draft", str(tmp_path / "head" / "ir"))
    assert settings["INFERENCE_PRECISION_HINT"] == settings["KV_CACHE_PRECISION"] == "f32"


def test_without_a_head_nothing_is_drafted(run):
    found = run(head=None)
    assert (found["verify_calls"], found["drafted"], found["accepted"]) == (0, 0, 0)
    assert found["accepted_by_position"] is None and "draft_model" not in Pipeline.asked[0][1]


def test_a_head_that_was_not_converted_is_refused(run, tmp_path):
    (tmp_path / "head" / "ir" / "openvino_model.xml").unlink()
    with pytest.raises(SystemExit, match="expected an EAGLE-3 head as OpenVINO IR"):
        run()
