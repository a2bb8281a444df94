"""Draft heads, one file per kind, and what settings and files call them."""

from __future__ import annotations

from conf.errors import UserError
from models.heads.config import HeadConfig
from models.heads.eagle1 import Eagle1Config, Eagle1Head
from models.heads.eagle3 import Eagle3Config, Eagle3Head
from models.heads.independent import IndependentConfig, IndependentHead
from models.heads.medusa import MedusaConfig, MedusaHead

KINDS: dict[str, tuple[type[HeadConfig], type]] = {
    "eagle1": (Eagle1Config, Eagle1Head),
    "eagle3": (Eagle3Config, Eagle3Head),
    "medusa": (MedusaConfig, MedusaHead),
    "independent": (IndependentConfig, IndependentHead),
}


def captured_layers(kind: str, wanted: list[int] | None) -> list[int] | None:
    """`verifier.aux_layers` for a head: as `wanted`, else the last hidden state (-1), none, or the usual three (None).

    An independent draft reads no states, and takes any layers along (to share stored states with a head that does).
    """
    if wanted is not None:
        return wanted
    return {"eagle1": [-1], "medusa": [-1], "independent": []}.get(kind)


def config_from_dict(kind: str, values: dict) -> HeadConfig:
    """A stored head's config; UserError for an unknown kind."""
    return kind_of(kind)[0].from_dict(values)


def build(config: HeadConfig, verifier, vocab):
    """An untrained head of this config on a verifier."""
    return kind_of(config.kind)[1].over(config, verifier, vocab)


def kind_of(kind: str) -> tuple[type[HeadConfig], type]:
    if not isinstance(kind, str) or kind not in KINDS:
        raise UserError(f"no head '{kind}'; there are: {', '.join(KINDS)}")
    return KINDS[kind]
