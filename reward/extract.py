"""Find the answer a model output commits to."""

from __future__ import annotations


def extract(output: str, task: str = "math") -> str | None:
    """Return the content of the last complete box after the last thinking block, or None."""
    text = output.rsplit("</think>", 1)[-1]
    if "<think>" in text:
        text = text.split("<think>", 1)[0]
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth, begin = 0, start + len("\\boxed{")
    for i in range(begin - 1, len(text)):
        depth += {"{": 1, "}": -1}.get(text[i], 0)
        if depth == 0:
            return text[begin:i].strip()
    return None
