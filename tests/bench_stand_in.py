"""A process of the training bench that is none: the worker in this one, and the naive step as another trainer."""

import json

from eval.training_bench.worker import Trainer


class InProcess:
    """As eval.training_bench.rival.Process. A peer freezes its LM head and knows a mean for each step alone."""

    def __init__(self, rival, setting, threads, log):
        peer = {"rival": "naive", "freeze_lm_head": True}
        self.trainer = Trainer({"setting": str(setting), "threads": threads, **(rival.options or peer)})
        self.about = {"versions": {}}

    def ask(self, **question):
        return json.loads(json.dumps(self.trainer.answer(json.loads(json.dumps(question)))))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass
