"""A data set of your own: a function that takes the options and returns samples.

    PYTHONPATH=examples semkv run --engine labels --dataset numbers_dataset:load --max-samples 40

``--max-samples`` and ``--shuffle-seed`` are applied to what it returns. An image is an
``ImageRef(name, path)`` in ``images``.
"""

from semkv_lab.samples import DatasetOptions, Sample

WORDINGS = ("What is {a} plus {b}?", "what is  {a} plus {b}?", "How much is {a} plus {b}?")


def load(options: DatasetOptions) -> list[Sample]:
    """Sums of small numbers, each asked in three wordings."""
    return [
        Sample(
            f"{a}+{b}-{number}",
            wording.format(a=a, b=b),
            answer=str(a + b),
            variant=f"wording {number}",
        )
        for a in range(2, 9)
        for b in range(2, 9)
        for number, wording in enumerate(WORDINGS)
    ]
