"""Rows of the training bench as Markdown."""

from __future__ import annotations

from eval.tables import markdown_table, number
from eval.training_bench.setting import Setting

HEAD = ("T", "answer", "K", "R", "step", "tok/s", "with argmax", "ours faster", "as trained", "memory GB",
        "ours' share", "teacher s", "forward s", "backward s", "optimizer s", "GFLOP", "of products",
        "of 2048²")  # fmt: skip
NOTES = """\
tok/s: all tokens of the row over teacher, forward and backward; medians of {repeats} turns, one step of each in turn.
`with argmax`: with the verifier's full-vocabulary argmax at the label rows (stored states hold it; naive has it in its
teacher). `ours faster`: median of the ratios within a turn, to our step with the same trained parameters; `as
trained`: to our step with its LM head trained. memory: growth of the process's peak in its first step; `ours' share`:
of our step with the same trained parameters. GFLOP: matrix products that the trained parameters need at rows that
count, attention apart; `of products` and `of 2048²`: their share of the speed of bare products of the step's shapes,
and of 2048-square ones, in the same dtype and run ({shapes} and {square} GFLOP/s). Our forward forms the LM head's
gradients as well. Same malloc settings and threads for all."""
PEERS = {
    "speculators": """\
speculators 0.9.0 freezes its LM head and computes no full-vocabulary argmax. It runs by SDPA with dense masks and its
eager loss: its fused loss needs Triton, which a CPU does not have, and flex attention has no backward there.""",
}


def markdown(values: dict) -> str:
    """values: as eval.bench writes them. The agreement, the table, and what its columns mean."""
    machine = f"{values['verifier']}, {values['dtype']}, {values['threads']} threads, torch {values['torch']}"
    lines = [f"Training step of an EAGLE-3 head, sizes of {machine}", "", *map(_agreed, values["agreement"]), ""]
    speeds = [row["products_gflops"] for row in values["rows"] if "missing" not in row]
    reached = {kind: f"{min(x[kind] for x in speeds):.0f} to {max(x[kind] for x in speeds):.0f}" for kind in speeds[0]}
    lines += [markdown_table(HEAD, map(_cells, values["rows"])), "", NOTES.format(**values, **reached)]
    missing = {f"{row['name']} at {_shape(row)}: {row['missing']}" for row in values["rows"] if "missing" in row}
    return "\n".join([*lines, *sorted(missing), *([PEERS[name]] if (name := values["peer"]) in PEERS else [])])


def _agreed(row: dict) -> str:
    loss = "" if row["loss"] is None else f"loss {row['loss']:.1e}, "
    return (f"- {row['name']}: relative difference of {loss}gradient {row['whole_gradient']:.1e} "
            f"(at worst {row['gradient']:.1e}, {row['where']})")  # fmt: skip


def _shape(row: dict) -> str:
    return f"T={row['tokens']}, answer {row['fraction']:g}, K={row['steps']}, R={row['draft_vocab']}"


def _cells(row: dict) -> list[str]:
    shape = [f"{row['tokens']}", f"{row['fraction']:g}", f"{row['steps']}", f"{row['draft_vocab']}", row["name"]]
    if "missing" in row:
        return shape + ["-"] * (len(HEAD) - len(shape))
    parts = row["parts"]
    return shape + [
        number(row["tokens_per_second"], 0), number(row.get("tokens_per_second_with_argmax"), 0),
        number(row.get("faster"), 2), number(row.get("faster_as_trained"), 2),
        number(row["growth_bytes"], 3, 1e-9), number(row.get("memory"), 2),
        *(number(parts[name], 3) for name in ("verifier", "forward", "backward", "optimizer")),
        number(row["useful_gflop"], 0), number(row["share_of_shapes"], 2), number(row["share_of_square"], 2),
    ]  # fmt: skip


def scaling_table(found: dict) -> str:
    """What eval.training_bench.scaling found."""
    lengths = markdown_table(
        ("T", "documents", "step s", "ms per 1000 tokens"),
        [(str(row["tokens"]), str(row["documents"]), number(row["step_seconds"], 3),
          number(row["step_seconds"] / row["tokens"], 1, 1e6)) for row in found["by_tokens"]],
    )  # fmt: skip
    steps = markdown_table(
        ("K", "ours s", "naive s"),
        [(str(K), number(ours, 3), number(naive, 3)) for K, ours, naive in found["by_steps"]],
    )
    memory = markdown_table(
        ("T", "R", "growth MB"),
        [
            (str(row["tokens"]), str(row["draft_vocab"]), number(row["growth_bytes"], 1, 1e-6))
            for row in found["memory"]
        ],
    )
    share, last = found["growth_with_steps"], found["bytes_per_token_and_column"]
    ratio = f"{number(found['linear'], 2)} times that at the fewest"
    texts = [
        f"Documents of {found['document']} tokens: time per token at the most tokens is {ratio}",
        lengths,
        f"A further draft step costs {number(share['ours'], 1, 1e3)} ms, naive's {number(share['naive'], 1, 1e3)} ms: "
        f"{number(share['share'], 2)} of it",
        steps,
        f"Peak memory has {number(last, 2)} bytes for each of T * R; whole float32 logits have 4 at each draft step",
        memory,
    ]
    return "\n\n".join(texts)


def profile_table(setting: Setting, found: dict) -> str:
    """What eval.training_bench.profile found."""
    total = sum(found["kinds"].values())
    kinds = [
        (name, number(seconds, 1, 1e3), number(seconds / total, 1, 100)) for name, seconds in found["kinds"].items()
    ]
    longest = [(name, number(seconds, 1, 1e3), str(calls)) for name, seconds, calls in found["operations"]]
    shape = (
        f"T={setting.tokens}, answer {setting.fraction:g}, K={setting.steps}, R={setting.draft_vocab}, {setting.dtype}"
    )
    texts = [
        f"{shape}: teacher, forward and backward",
        markdown_table(("kind", "ms", "%"), kinds),
        markdown_table(("operation", "ms", "calls"), longest),
    ]
    return "\n\n".join(texts)
