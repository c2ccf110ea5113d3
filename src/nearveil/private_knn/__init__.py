"""Private-kNN and related models: private records vote on public queries.

* :class:`PrivateKNeighborsClassifier`: the nearest private records vote for a class, or for many labels;
* :class:`PrivateKNeighborsRegressor`: they give the mean or the median of their values;
* :class:`PrivateDiscriminant`: a linear model with noise that is added once; exports a :class:`PublicDiscriminant`;
* :class:`Student`: learns from the answers, and exports a public :class:`PublicStudent`.

Their rival, PATE, is :class:`studies.pate.PateClassifier`, in ``nearveil-studies``.
"""

from nearveil.lazy import require_extra

with require_extra("knn"):
    from nearveil.private_knn._knn import PrivateKNeighborsClassifier, PrivateKNeighborsRegressor
    from nearveil.private_knn.discriminant import PrivateDiscriminant, plan_publications
    from nearveil.private_knn.discriminant_model import PublicDiscriminant
    from nearveil.private_knn.estimator import AnsweredScore, Answers
    from nearveil.private_knn.plan import NoiseWarning
    from nearveil.private_knn.scaling import ScalingWarning
    from nearveil.private_knn.spending import ExhaustedError
    from nearveil.private_knn.student import Student
    from nearveil.private_knn.student_model import PublicStudent

__all__ = [
    "AnsweredScore",
    "Answers",
    "ExhaustedError",
    "NoiseWarning",
    "PrivateDiscriminant",
    "PrivateKNeighborsClassifier",
    "PrivateKNeighborsRegressor",
    "PublicDiscriminant",
    "PublicStudent",
    "ScalingWarning",
    "Student",
    "plan_publications",
]
