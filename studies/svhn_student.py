"""The student of SVHN with the network of the supplement (table 2), beside the default student, on the same votes."""

import importlib.util
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from studies import _figures as draw
from studies import private_knn as shared
from studies._report import show
from studies._study import Case, Row, Study, list_cases, mean, select
from studies.data import FOLDERS, load_digit_images
from studies.networks import NetworkStudent

EPSILONS = (2.0, 8.0)
SEEDS = (0,)  # a network takes minutes
EPOCHS = 4
ARCHITECTURE: Any = "svhn"
VECTOR, NETWORK = "support vector machine on HOG", "network of table 2"
LEARNERS = (VECTOR, NETWORK)
TRUE = "true labels"


def cases() -> list[Case]:
    """Return every student on every split, taught by votes or by true labels."""
    return list_cases(learner=LEARNERS, epsilon=(*EPSILONS, None), seed=SEEDS)


def measure(case: Case) -> list[Row]:
    """Teach one student on one split, and score it on the images held."""
    network, epsilon, seed = case["learner"] == NETWORK, case["epsilon"], case["seed"]
    if network and importlib.util.find_spec("torch") is None:
        return [{**case, "left_out": "torch is not installed (the extra `torch`)"}]
    digits = load_digit_images("svhn")
    order = np.random.default_rng(seed).permutation(len(digits.test))
    testing, public = order[: shared.HELD], order[shared.HELD :]
    if epsilon is not None:
        learner = NetworkStudent(ARCHITECTURE, epochs=EPOCHS) if network else None
        taught = shared.teach(
            digits, lambda source: shared.make_ours(epsilon, source), public, testing, seed, learner=learner
        )
        return [{**case, "spent": taught.pop("epsilon"), **taught}]
    if not network:
        references = shared.score_references(digits, public, testing)
        return [{**case, "accuracy": references[shared.TRUE], "answered": len(public)}]
    student = NetworkStudent(ARCHITECTURE, epochs=EPOCHS, random_state=seed)
    student.fit(digits.test[public], digits.test_y[public])
    accuracy = float(student.score(digits.test[testing], digits.test_y[testing]))
    return [{**case, "accuracy": accuracy, "answered": len(public)}]


def figures(rows: pd.DataFrame) -> dict[str, Figure]:
    """Draw accuracy over epsilon for both students, and what true labels would give."""
    figure, ((axes,),) = draw.make_panels(1, 1, (6.6, 4.4))
    measured = rows[rows["accuracy"].notna()]
    for position, learner in enumerate(LEARNERS):
        here = select(measured, learner=learner)
        voted = here[here["epsilon"].notna()].astype({"epsilon": float})
        draw.curves(axes, voted, "accuracy", "epsilon", by="learner", index=position)
        truth = here.loc[here["epsilon"].isna(), "accuracy"]
        if len(truth):
            level = draw.level(mean(truth), [min(EPSILONS), max(EPSILONS)])
            draw.curve(axes, TRUE, level, index=position + 2, label=f"{learner}, {TRUE}")
    draw.epsilon_axis(axes, EPSILONS, label="epsilon of all answers")
    axes.set(ylim=(0, 1))
    draw.finish(figure, axes, "accuracy on held-out images", ncols=2)
    return {"accuracy": figure}


def facts(rows: pd.DataFrame) -> dict[str, Any]:
    """Return all accuracies."""
    measured = rows[rows["accuracy"].notna()]
    taught = measured.assign(epsilon=measured["epsilon"].map(lambda e: TRUE if pd.isna(e) else f"{e:g}"))
    cells = show(taught, "accuracy", "learner", "epsilon", spec=".3f", least=0, most=1).rename("accuracy")
    means = taught.groupby(["learner", "epsilon"])[["answered"]].mean()["answered"].map("{:,.0f}".format)
    right = measured.groupby("epsilon")["labels_right"].mean().to_dict() if "labels_right" in measured else {}
    return {
        "lines": pd.DataFrame({"accuracy": cells, "labels": means.reindex(cells.index)}).reset_index(),
        "answers": shared.ANSWERS,
        "right": [(float(epsilon), share) for epsilon, share in right.items()],
        "left_out": rows["left_out"].dropna().unique().tolist() if "left_out" in rows else [],
    }


PARAMETERS = {"epsilons": EPSILONS, "epochs": EPOCHS, "answers": shared.ANSWERS, "held out": shared.HELD}
FILES = (f"{FOLDERS['svhn']}/{FOLDERS['svhn']}.npz",)
STUDY = Study("svhn-student", cases, measure, figures, facts, FILES, PARAMETERS, SEEDS)
