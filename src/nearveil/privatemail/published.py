"""Versions of PrivateMail as published; none is sound. ``studies.published_mail`` runs them."""

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from studies.published_mail import PublishedEngine

Version = Literal["2022", "2021", "2022-code"]
Experiment = Literal["cars196", "cub200", "cifar100"]

EXPERIMENTS: dict[Experiment, dict[str, float]] = {  # the columns of Table 2 (2022) that differ
    "cars196": {"bandwidth": 6.0, "label_weight": 0.6},
    "cub200": {"bandwidth": 5.0, "label_weight": 0.5},
    "cifar100": {"bandwidth": 6.0, "label_weight": 0.6},
}

REASONS: dict[Version, str] = {
    "2022": "its sensitivity bound is false (Lemma 1 bounds a square and is used as its root) and the target's own "
    "label is used after the noise, which is not post-processing",
    "2021": "its sensitivity bound holds with a probability that is vacuous, feeds an L2 bound to Laplace noise, is "
    "reused for later iterations that it does not cover, and the target's own label is used after the noise",
    "2022-code": "the program adds noise with a variance for its deviation and uses the target's true label in every "
    "iteration after it: the result is the label",
}


def load_engine() -> "type[PublishedEngine]":
    """Import the engine of the published versions, which comes with the studies."""
    try:
        from studies.published_mail import PublishedEngine
    except ModuleNotFoundError:
        raise ModuleNotFoundError("as_published needs the studies: pip install nearveil-studies") from None
    return PublishedEngine
