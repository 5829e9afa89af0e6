"""What docs/porting.md says about labels and keywords holds for every member."""

from __future__ import annotations

import re

from tests.inventory import _FACTS as INVENTORY

#: Label in Swift -> keyword in Python, where they differ; docs/porting.md lists them. zero_point= works as well.
OTHER = {
    ("type", "activation_type"), ("type", "convolution_type"), ("type", "loss_type"), ("type", "pooling_type"),
    ("min", "min_value"), ("max", "max_value"), ("zeroPoint", "bias"),
}  # fmt: skip
#: Labels that say nothing but where the argument stands.
POSITIONAL = {"with", "for", "_"}


def snake(word: str) -> str:
    return re.sub(r"(?<=[a-z0-9])([A-Z])", r"_\1", word).lower()


def test_labels_are_keywords() -> None:
    seen = set()
    for name, entry in INVENTORY["classes"].items():
        for member in entry["members"]:
            swift = member.get("swift", "")
            if member["kind"] == "property" or "(" not in swift:
                continue
            for label, keyword in zip(re.findall(r"(\w+):", swift), member.get("params", []), strict=False):
                pair = (label, keyword)
                if pair in OTHER:
                    seen.add(pair)
                elif label not in POSITIONAL:
                    # A factory's name may end in its first label: convolutionWeightsWithWidth(_:), zeroPadding:.
                    assert snake(label).endswith(keyword), f"{name}.{swift}: {label}: is {keyword}="
    assert seen == OTHER
