"""All mechanisms by name, and public names that are not audited."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial, singledispatch
from typing import Any, Literal

from nearveil.audit._experiment import Experiment
from nearveil.audit._releases import import_studies, make_noise_experiment, make_release_experiment
from nearveil.mechanisms import Release
from nearveil.mechanisms.catalog import REGISTRY, MechanismEntry
from nearveil.privacy.noise import GaussianNoise, LaplaceNoise, Source, calibrate_gaussian, calibrate_laplace

EPSILON = 4.0
DELTA = 1e-4  # small enough to matter, large enough to be seen in affordable runs
FEW_DELTA = 0.05  # of mechanisms that are fitted in every run

Make = Callable[[], Any]
Expected = Literal["kept", "broken", "open"]

# Parameters for fast runs with events that are frequent enough to be seen, by name prefix.
_CHANGED: dict[str, dict[str, Any]] = {
    "privatemail (gaussian)": {"delta": DELTA},
    "analytic-gaussian": {"delta": DELTA},
}


@dataclass(frozen=True, eq=False)
class AuditEntry:
    """A mechanism that can be audited by name."""

    name: str
    make: Callable[[], Experiment]  # may take a second, because it fits
    expected: Expected = "kept"  # "open": not proved, and no attack is known to work
    subject: str = ""  # the audited public name


def list_mechanisms(epsilon: float = EPSILON) -> list[AuditEntry]:
    """Return the mechanisms of the library that have a guarantee, by their names in ``nearveil mechanisms``.

    An entry has a `name`, the public name of its `subject`, and `make()`, which returns the experiment.

    Examples
    --------
    >>> from nearveil.audit import audit
    >>> covers = next(entry for entry in list_mechanisms(1.0) if entry.name == "covers")
    >>> audit(covers.make(), trials=400).verdict != "broken"
    True
    """
    gaussian = partial(calibrate_gaussian, epsilon, 1e-5, sensitivity=1.0, size=1)
    laplace = partial(calibrate_laplace, epsilon, sensitivity=1.0, size=1)
    return [
        *list_releases((entry for entry in REGISTRY if not entry.labelled), epsilon, _CHANGED, {}),
        make_entry("gaussian noise", gaussian, subject="nearveil.privacy.noise.GaussianNoise"),
        make_entry("laplace noise", laplace, subject="nearveil.privacy.noise.LaplaceNoise"),
    ]


def list_releases(
    entries: Iterable[MechanismEntry],
    epsilon: float,
    changed: Mapping[str, Mapping[str, Any]],
    expected: Mapping[str, Expected],
) -> list[AuditEntry]:
    """Return releases by name; `changed` has parameters by name prefix, `expected` the verdicts besides "kept"."""
    audited = []
    for entry in entries:
        parameters = next((values for prefix, values in changed.items() if entry.name.startswith(prefix)), {})
        make = partial(entry.make, epsilon, **parameters)
        audited.append(make_entry(entry.name, make, expected.get(entry.name, "kept"), name_subject(entry.kind)))
    return audited


def name_subject(kind: type) -> str:
    """Return the public name of a class: its package's."""
    return ".".join([*kind.__module__.split(".")[:2], kind.__name__])


def list_not_audited() -> dict[str, str]:
    """Return the public names that no audit attacks, each with its reason."""
    data = "holds values, releases nothing"
    return {
        "nearveil.AsyncClient": "the core of nearveil.Client, which is audited",
        "nearveil.Index": "stores items, releases nothing",
        "nearveil.Ledger": "opens accounts, releases nothing",
        "nearveil.Retriever": "ranks the answers of a mechanism, which is audited",
        "nearveil.SupervisedManifold": "has no guarantee: it is fitted on public rows",
        "nearveil.__version__": "text",
        "nearveil.evaluate": "measures on public rows",
        "nearveil.mechanisms.Message": data,
        "nearveil.mechanisms.MessageError": "an error",
        "nearveil.mechanisms.Release": "the base class; each release is audited",
        "nearveil.mechanisms.default": "returns Covers, which is audited",
        "nearveil.private_knn.AnsweredScore": data,
        "nearveil.private_knn.Answers": data,
        "nearveil.private_knn.ExhaustedError": "an error",
        "nearveil.private_knn.PublicDiscriminant": "the export of a discriminant; audited with it",
        "nearveil.private_knn.PublicStudent": "the export of a student; audited with it",
        "nearveil.private_knn.plan_publications": "returns a plan, releases nothing",
    }


def make_entry(
    name: str, make: Make, expected: Expected = "kept", subject: str = "", trials: int | None = None
) -> AuditEntry:
    """Return an entry that makes an experiment of its name; `make` returns a mechanism, or also its claim."""

    def make_named() -> Experiment:
        result = make()
        mechanism, claim = result if isinstance(result, tuple) else (result, None)
        experiment = make_experiment(mechanism)
        return replace(
            experiment, name=name, trials=trials or experiment.trials, guarantee=claim or experiment.guarantee
        )

    return AuditEntry(name, make_named, expected, subject)


@singledispatch
def make_experiment(mechanism: Any, source: Source | None = None) -> Experiment:
    """Return the experiment of a mechanism; `source` is for the search for the worst pair."""
    if import_studies():
        return make_experiment(mechanism, source)
    raise ValueError(
        "mechanism must be a release, noise, or an Experiment that runs one; with nearveil-studies also a voting "
        "estimator, a student, a discriminant or a private PCA"
    )


make_experiment.register(Experiment, lambda experiment, _=None: experiment)
make_experiment.register(Release, make_release_experiment)
make_experiment.register(GaussianNoise | LaplaceNoise, lambda noise, _=None: make_noise_experiment(noise))
