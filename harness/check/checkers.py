"""What judges a learner's file, by what kind of file it is."""

from harness.learner.work import Work


def make_checker(work: Work):
    """What judges a file: the NumPy checker, or the one of the kernels, which takes seconds to import."""
    if work.numpy:
        from harness.check.rungs import NumpyChecker

        return NumpyChecker(work.puzzle)
    from harness.check.gates import Checker

    return Checker(work.puzzle)
