"""The typed shape of every command's settings: a name that is not here is an error, in a file or typed by hand.

Registered in Hydra's ConfigStore; the YAML files beside this one fill it. Commands receive these dataclasses
(plain lists and numbers inside), never an OmegaConf object.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING

from conf.workload import WorkloadConf


@dataclass
class VerifierConf:
    source: str = "smollm2"  # "smollm2" (shipped in a wheel), a local folder, or a hub name
    dtype: str = "auto"  # auto: bfloat16 where the device has it natively, else float32
    device: str = "auto"  # a torch device; auto: a GPU where there is one
    aux_layers: list[int] | None = None  # null: 2, L//2, L-3
    trust_remote_code: bool = False  # run the Python code in its folder
    revision: str | None = None  # of the hub: a commit, branch or tag
    # Layers over several devices, host memory or the disk, by accelerate: "auto", or {module: device}
    device_map: Any = None
    max_memory: Any = None  # of it on each device: {0: 70GiB, cpu: 200GiB}
    whole: bool = True  # false: without its layers, to train from states that were captured before; nothing is decoded


@dataclass
class HeadConf:
    name: str = "eagle3"  # "eagle1" | "eagle3" | "medusa" | "independent"
    ttt_steps: int = 7  # K of EAGLE heads; 1 is training without test-time steps
    draft_vocab_size: int | None = None  # null: 8192 below 64k tokens, else 32000; EAGLE-1: all of them
    # "verifier": layer and norm from the verifier's; "random"; or a folder with a head to go on from: a run, or a
    # published EAGLE-1 or EAGLE-3 checkpoint
    start: str = "verifier"
    start_layer: int = -1  # which decoder layer to start from
    start_lm_head: str = "verifier"  # "verifier" | "random"
    train_lm_head: bool = True  # false: it stays as it starts, and costs no gradient
    fc_norm: bool = False  # EAGLE-3.1: a norm on each captured state
    norm_output: bool = False  # EAGLE-3.1: what is fed back has passed the final norm
    heads: int = 5  # Medusa: drafts at once
    blocks: int = 1  # Medusa: residual blocks in each head
    layers: int = 2  # independent draft: decoder layers


@dataclass
class ObjectiveConf:
    """What the head learns; each is a switch of its own. Sums are over (anchor, step) pairs, weighted by step."""

    token: str = "ce"  # "ce": soft cross-entropy | "lk": between KL and TV by acceptance | "lk_alpha": -log acceptance
    token_weight: float = 1.0  # of that loss
    feature_weight: float = 0.0  # SmoothL1 against the verifier's last hidden state (EAGLE-1)
    top_k_weight: float = 0.0  # cross-entropy on the verifier's `top_k` best tokens (HASS)
    top_k: int = 10  # for top_k_weight
    weights: str = "decay"  # "decay": step_decay ** k | "vat": 1 up to the first rejection, decaying from there
    step_decay: float = 0.8  # the weight of a step over that of the one before
    survival: float = 0.0  # weight of an output that learns whether a draft and all before it are accepted (VAT)
    noise: float = 0.0  # uniform noise on the captured states, +- this much (EAGLE-1: 0.1)
    tokens: str = "given"  # later steps read: "given": the text | "own": the head's drafts, which the verifier labels


@dataclass
class DataConf:
    # A file, folder, glob or hub dataset, or {path, weight, split, name, revision}, or a list of these (docs/data.md).
    # null: the verifier writes the dialogues
    path: Any = None
    answers: str = "regenerate"  # "regenerate": the verifier answers; "given": keep the file's answers
    supervised: str = "answers"  # "dialogue": prompts too, where the verifier wrote them
    thinking: str = "template"  # in answers: "template": as it writes them; "strip": without it; "drop": leave them out
    unique: str = "document"  # "prompt": one dialogue for each first question
    exclude: Any = None  # suites or files whose prompts must not be trained on; null: those of evaluation.prompts
    server: Any = None  # http://HOST:PORT, or a list: OpenAI-compatible servers that write in the verifier's place
    server_model: str | None = None  # its name there; null: the only one that they serve
    concurrency: int = 32  # requests under way at each server
    max_documents: int | None = None  # dialogues
    max_tokens: int | None = None  # answer tokens
    minutes: float | None = None  # of writing; the first bound met of these three ends the data
    max_new_tokens: int = 192  # of an answer that is written
    max_length: int = 1024  # longer dialogues end at their last whole turn, with a count; see data/documents.py
    temperature: float = 0.0  # of answers
    prompt_temperature: float = 1.0  # of prompts that the verifier writes
    # First words of the verifier's prompts, taken in turn; "" leaves one to itself, and so does an empty list.
    openings: list[str] = field(default_factory=list)
    batch_size: int = 64  # sequences generated at once
    validation: int = 24  # documents held out
    store: bool = True  # keep the verifier's states on disk; false: compute them in every step
    store_dtype: str = "auto"  # the verifier's; or another float, and in one byte a value int8, float8
    seed: int = 0  # of what is sampled, and of what is held out


@dataclass
class OptimConf:
    name: str = "adamw"  # "adamw" | "muon" (Muon for the matrices inside the layer, AdamW for the rest)
    lr: float = 1e-3  # at the end of the warm-up; it falls as a cosine from there
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    eps: float = 1e-8
    weight_decay: float = 0.0
    matrix_lr: float = 0.02  # Muon's part
    momentum: float = 0.95  # Muon's part
    warmup_ratio: float = 0.03  # of the run's steps
    final_lr_ratio: float = 0.0  # where the cosine ends, over lr
    clip: float = 0.5  # norm of the gradient


@dataclass
class TrainerConf:
    max_steps: int | None = None  # optimizer steps; the first bound met of these three ends the run
    minutes: float | None = None  # of training
    epochs: float | None = None  # passes over the data
    tokens_per_step: int = 1024  # per rank and accumulation step
    accumulate: int = 1  # batches whose gradients are one step
    accelerator: str = "auto"  # Lightning's: cpu, gpu
    devices: Any = 1  # Lightning's: how many, or which
    num_nodes: int = 1  # machines
    strategy: str = "auto"  # Lightning's: ddp
    precision: str = "auto"  # auto: bf16-mixed where the device has bfloat16 natively, else 32-true
    log_every: int = 10  # steps
    validate_every: int = 200  # optimizer steps; 0: never
    validate_prompts: int = 8  # decoded by the loop at each validation
    checkpoint_every: int = 200  # steps
    checkpoints: int = 2  # how many of the newest are kept, beside the best
    nonfinite: str = "stop"  # a loss or gradient that is no number: "stop" with a reproducer | "skip" the step, counted
    deterministic: bool = False  # only kernels that give the same bits every time; slower on a GPU
    progress: bool = True  # the bar
    tflops: float | None = None  # for plan=true: matrix products of a device, 1e12 a second; null: measured here


@dataclass
class DecodeConf:
    mode: str = "chain"  # or "tree"
    depth: int = 5  # drafts of a chain, levels of a tree
    branch: int = 10  # EAGLE-2's k: nodes of a level that go on, and children of each
    total_tokens: int = 60  # of an EAGLE-2 tree, the pending token included
    shape: Any = None  # of a fixed tree instead: children a level, [2,2,2], or paths of ranks, [[0],[1],[0,0]]
    min_confidence: float = 0.0  # drafts of a less likely path are left out
    points: bool = False  # at a temperature: the draft's best tokens, as point masses, instead of draws from its law
    batch: int = 1  # sequences decoded at once
    temperature: float = 0.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    max_new_tokens: int = 128
    dtype: str = "float32"  # float32: the text is the verifier's own, token for token; bfloat16 for speed


@dataclass
class EvaluationConf:
    prompts: Any = field(default_factory=lambda: ["humaneval", "eyrie"])  # suite names or JSONL paths
    limit: int | None = None  # prompts per suite
    minutes: float = 0.0  # of `minutes`, kept free for measuring, export and report
    plots: bool = True  # alpha.png
    report: bool = True  # report.html


@dataclass
class StudyConf:
    """Several arms trained on the same data and compared (experiment=ttt_study); without arms, an ordinary run."""

    # name -> settings of head, objective and optim that set it apart. A further one adds to an experiment's:
    # +study.arms={own:["head.ttt_steps=7","objective.tokens=own"]}
    arms: dict[str, list[str]] = field(default_factory=dict)
    seeds: list[int] = field(default_factory=lambda: [0])  # each arm is trained once with each; the data is the same
    equal: str = "steps"  # what a clock gives every arm as much of: "steps" | "minutes"


@dataclass
class LoggerConf:
    wandb: bool = True  # offline unless WANDB_MODE says otherwise; metrics.csv is always written
    project: str = "eyrie"


@dataclass
class RunConf:
    """What every command has."""

    seed: int = 0  # of everything drawn by lot
    json: bool = False  # print one JSON object as the last line of standard output
    threads: int | None = None  # of the CPU; null: torch's choice


@dataclass
class TrainConf(RunConf):
    """python -m train"""

    name: str = "train"  # the run folder is output_dir/name/time
    budget_name: str | None = None  # what budget= sets; goes into the plan and the provenance
    output_dir: str = "outputs"
    minutes: float | None = None  # the whole job, evaluation included; training takes what the data leaves of it
    plan: bool = False  # print the plan and stop
    resume: str | None = None  # a run folder to continue
    # "???" here, so that a group file may leave it for the user to give
    verifier: VerifierConf = field(default_factory=lambda: VerifierConf(source=MISSING))
    head: HeadConf = field(default_factory=HeadConf)
    objective: ObjectiveConf = field(default_factory=ObjectiveConf)
    data: DataConf = field(default_factory=lambda: DataConf(path=MISSING))
    optim: OptimConf = field(default_factory=OptimConf)
    trainer: TrainerConf = field(default_factory=TrainerConf)
    decode: DecodeConf = field(default_factory=DecodeConf)
    evaluation: EvaluationConf = field(default_factory=EvaluationConf)
    study: StudyConf = field(default_factory=StudyConf)
    logger: LoggerConf = field(default_factory=LoggerConf)


@dataclass
class ReproduceCommandConf(RunConf):
    """python -m train.reproduce"""

    file: str | None = None  # RUN/nonfinite/step-N.pt, as the message of a run that stopped names it
    verifier_source: str | None = None  # null: as in the run's config.yaml


@dataclass
class DataCommandConf(TrainConf):
    """python -m data: takes the same experiments and budgets as training, so the caches are the same ones."""

    task: str | None = None  # synthesize | regenerate | tokenize | vocab | capture | inspect
    limit: int | None = None  # documents to show or process
    out: str | None = None
    server: str | None = None  # capture: a vLLM server that writes hidden states, http://HOST:PORT


@dataclass
class CandidateConf(RunConf):
    """What drafts, for which verifier, and how."""

    run: str | None = None  # a run folder, a head folder, or a published EAGLE-1 or EAGLE-3 checkpoint
    # instead of a run: any smaller model of the verifier's tokenizer, or "prompt_lookup", "lookahead", "none"
    draft: str | None = None
    # null: as in the run's config.yaml; without one, the verifier that the head names
    verifier_source: str | None = None
    verifier_device: str | None = None
    verifier_revision: str | None = None
    verifier_trust_remote_code: bool | None = None
    temperature: float | None = None  # short for decode.temperature
    decode: DecodeConf = field(default_factory=DecodeConf)


@dataclass
class EvalCommandConf(CandidateConf):
    """python -m eval"""

    prompts: Any = field(default_factory=lambda: ["humaneval", "eyrie"])
    limit: int | None = 20  # prompts per suite, evenly spaced; null: all
    replay: bool = False  # acceptance alone, on the verifier's recorded greedy text: many heads cost one verifier run
    serve: str | None = None  # a running server, http://HOST:PORT: what it gets of these prompts, beside our loop
    serve_model: str | None = None  # its name there; null: the only one that it serves
    serve_batch: int = 8  # requests under way at a time
    plots: bool = True
    report: bool = True
    out: str | None = None  # null: a new eval-TIME in the run folder


@dataclass
class StreamCommandConf(CandidateConf):
    """python -m eval.stream"""

    prompt: str | None = None  # null: standard input


@dataclass
class SweepCommandConf(CandidateConf):
    """python -m eval.sweep: temperature=, decode.batch=, context= and decode.depth= are the middle"""

    context: int = 0  # tokens of a prompt, earlier turns included; 0: prompts as they are
    temperatures: list[float] = field(default_factory=lambda: [0.0, 0.3, 0.6, 0.8, 1.0, 1.3])
    batches: list[int] = field(default_factory=lambda: [1, 2, 4, 8, 16, 32, 64])
    contexts: list[int] = field(default_factory=lambda: [0, 512, 1024, 2048, 4096])
    depths: list[int] = field(default_factory=lambda: [1, 2, 3, 5, 7, 10])  # N
    grid: bool = False  # every combination, not one axis at a time around the middle
    prompts: Any = field(default_factory=lambda: ["eyrie"])
    limit: int | None = 6  # prompts per suite, evenly spaced; null: all
    repeats: int = 2  # how often each prompt is decoded at a point, at least; full batches take more
    # suites or files whose questions, and the verifier's answers to them, are the earlier turns of long contexts
    earlier: Any = field(default_factory=lambda: ["humaneval", "eyrie"])
    plots: bool = True
    out: str | None = None  # null: sweep-KEY in the run folder, the same for the same settings: what is done is kept


@dataclass
class DiagnoseCommandConf(CandidateConf):
    """python -m eval.diagnose"""

    prompts: Any = field(default_factory=lambda: ["humaneval", "eyrie"])
    limit: int | None = 20  # prompts per suite, evenly spaced; null: all
    # a Jinja file: where one of the verifier's chat template and the head's is another than it should be, this is the
    # other one. The head's may be the verifier's own, then this is the one that prompts come in
    template: str | None = None
    unlikely: float = 0.3  # the verifier is unsure where its best token is less probable than this
    plots: bool = True
    out: str | None = None  # null: a new diagnose-TIME in the run folder


@dataclass
class ServeCheckCommandConf(RunConf):
    """python -m eval.serving.check, which `make serve-check` runs"""

    runs: Any = None  # run folders of heads
    engines: list[str] = field(default_factory=lambda: ["vllm"])
    environments: str = ".engines"  # where `make` put an environment for each of them
    depths: list[int] = field(default_factory=lambda: [3])  # drafts of a chain
    prompts: Any = field(default_factory=lambda: ["humaneval", "eyrie"])
    limit: int | None = 20  # prompts per suite, evenly spaced; null: all
    max_new_tokens: int = 128
    batch: int = 8  # sequences at once, in the engine and in our loop
    dtype: str = "float32"
    out: str | None = None  # null: outputs/serve-check/TIME


@dataclass
class ReportCommandConf(RunConf):
    """python -m eval.report"""

    runs: Any = None  # one folder with an alpha.json, or a list to compare
    out: str | None = None  # the page; null: report.html in the one run's folder, or outputs/comparison-TIME/


@dataclass
class CompareCommandConf(RunConf):
    """python -m eval.compare"""

    runs: Any = None  # run or evaluation folders with an alpha.json, or such files
    base: str | None = None  # the run, or name, that the others are compared with; null: the first
    names: Any = None  # one for each run; runs of the same name are pooled. null: the folders' names
    out: str | None = None  # null: outputs/comparison-TIME


@dataclass
class BenchCommandConf(RunConf):
    """python -m eval.bench"""

    kind: str | None = None  # decode | train | sweep | scaling | profile, the first word of the command
    run: str | None = None  # decode: also its head at every depth, with the run's verifier in place of this one
    repeats: int = 5
    max_new_tokens: int = 48
    depth: int = 5
    draft_layers: int = 4  # decode: the verifier's own first layers as an independent draft
    batches: list[int] = field(default_factory=lambda: [8, 64])  # decode: sequences generated at once
    # train: every combination of these; sweep: one at a time around eval.bench_train.MIDDLE; null: the kind's own
    tokens: list[int] | None = None  # T
    fractions: list[float] | None = None  # of each document that is answer
    steps: list[int] | None = None  # TTT steps K
    vocabularies: list[int] | None = None  # R
    documents: int = 1  # in the row of T tokens
    naive: bool = True  # also against our own naive step
    peer: str | None = "speculators"  # another trainer, whose environment `make` puts below `environments`
    environments: str = ".engines"
    out: str | None = None  # null: outputs/bench/KIND-TIME.json
    verifier: VerifierConf = field(default_factory=VerifierConf)


@dataclass
class GpuCheckCommandConf(RunConf):
    """python -m eval.gpu_check, which `make gpu-check` runs"""

    device: str = "cuda"
    tokens: int = 4096  # of the timed step: T
    fraction: float = 0.4  # of it that is answer
    steps: int = 7  # K
    draft_vocab: int = 32000  # R
    repeats: int = 10
    environments: str = ".engines"  # where another trainer may lie
    out: str | None = None  # null: outputs/gpu-check/TIME.json
    verifier: VerifierConf = field(default_factory=VerifierConf)  # its shapes; weights are random


@dataclass
class TheoryCommandConf(RunConf):
    """python -m eval.theory: one of the first four"""

    alpha: float | None = None  # acceptance, the same at every depth
    profile: list[float] | None = None  # n-alpha: acceptance by depth
    by_position: list[float] | None = None  # instead, as engines log it: P(draft n accepted), unconditional
    run: str | None = None  # a folder with an alpha.json, or such a file: its n-alpha and its times
    c: float | None = None  # draft step / verify call; null: the run's times, or 0.05
    widths: Any = None  # cost of a verify call by its rows, {1:1,16:1.3}; null: all the same
    max_n: int = 64  # how deep an alpha is followed
    batches: list[int] | None = None  # sequences at once; null: 1 to 64 where the cost of wide calls is known
    shape: list[int] | None = None  # a tree, children a level: [2,2,2]
    hits: list[float] | None = None  # of it: P(a node of this level is accepted | one of the level above was)
    out: str | None = None  # folder for theory.json and theory.png; null: nothing is written


@dataclass
class SimulateCommandConf(RunConf):
    """python -m eval.simulate"""

    name: str | None = None  # chi_square | n_sweep | tree | rollback | draft_quality | all
    rounds: int | None = None  # verify calls of all but rollback; null: each has its own number
    seeds: int = 100  # chi_square: how often it is asked
    alpha: float = 0.9  # n_sweep
    c: float = 0.04  # n_sweep, tree: draft step / verify call
    max_n: int = 40  # n_sweep
    shape: list[int] = field(default_factory=lambda: [2, 2, 2])  # tree: children a level
    depth: int = 4  # rollback: drafts a round
    out: str | None = None  # null: outputs/simulate-TIME


@dataclass
class TunerCommandConf(RunConf):
    """python -m eval.tuner"""

    run: str | None = None  # a run or evaluation folder with an alpha.json, or such a file: a measured chain
    tree: str | None = None  # such a folder measured with decode=tree, beside it
    sweep: str | None = None  # a sweep of the same head, beside it: a folder with a sweep.json, or such a file
    metrics: Any = None  # instead: a file or address of a vLLM, SGLang or llama.cpp /metrics page, or [before, after]
    family: str | None = None  # what drafted there, where neither says it
    workload: WorkloadConf = field(default_factory=WorkloadConf)
    out: str | None = None  # folder of tuner.md and tuner.json; null: the run's, or outputs/tuner-TIME


@dataclass
class ExportCommandConf(RunConf):
    """python -m models.export"""

    run: str | None = None  # a run folder, or a head folder
    format: str = "safeai"
    out: str | None = None
    dtype: str = "auto"  # the verifier's own, as its files have it
    embedding: bool = False  # also write the verifier's embedding, where the format can do without
    # where the head's verifier lies now (it is then checked to be the head's, and its embedding written as well)
    verifier_source: str | None = None


COMMANDS = {
    "train": TrainConf,
    "reproduce": ReproduceCommandConf,
    "data": DataCommandConf,
    "eval": EvalCommandConf,
    "stream": StreamCommandConf,
    "sweep": SweepCommandConf,
    "diagnose": DiagnoseCommandConf,
    "serve_check": ServeCheckCommandConf,
    "report": ReportCommandConf,
    "compare": CompareCommandConf,
    "bench": BenchCommandConf,
    "gpu_check": GpuCheckCommandConf,
    "theory": TheoryCommandConf,
    "simulate": SimulateCommandConf,
    "tuner": TunerCommandConf,
    "export": ExportCommandConf,
}
for _name, _schema in COMMANDS.items():
    ConfigStore.instance().store(name=f"{_name}_schema", node=_schema)
