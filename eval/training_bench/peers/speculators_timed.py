"""Seconds of forward and backward of speculators' EAGLE-3 step, by its own Python:

speculators_timed.py SETTING cuda|cpu REPEATS

On CUDA with its defaults, flex attention and the fused loss; on a CPU with SDPA and the eager one. One JSON object.
"""

import json
import sys
import time

import torch
from safetensors import safe_open
from speculators_worker import DECAY, batch_of, build


def main(path, kind, repeats):
    with safe_open(path, "pt") as file:
        about = file.metadata()
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 - it is no dict
    setting, cuda = json.loads(about["setting"]), kind == "cuda"
    dtype = getattr(torch, setting["dtype"])
    model = build(json.loads(about["config"]), tensors, "simple_flex_attention" if cuda else "sdpa").to(kind)
    batch = {name: tensor.to(kind) for name, tensor in batch_of(tensors, setting, dtype).items()}
    implementation = "fused" if cuda else "eager"
    settings = {"ttt_steps": setting["steps"], "ttt_step_loss_decay": DECAY, "loss_implementation": implementation}
    settings = model.get_trainer_kwargs(loss_fn="kl_div", **settings)[0]
    seconds = []
    for _ in range(repeats + 1):  # the first compiles
        model.zero_grad(set_to_none=True)
        if cuda:
            torch.cuda.synchronize()
        begun = time.perf_counter()
        with torch.autocast(kind, torch.bfloat16, enabled=dtype != torch.float32):
            loss = model(**batch, **settings)[1]
        loss.backward()
        if cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begun)
    print(json.dumps({"seconds": seconds[1:]}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
