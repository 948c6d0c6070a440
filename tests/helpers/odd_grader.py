"""A grader that does what a row's expected answer says; here, so that grading processes can import it."""

from __future__ import annotations

import time
from typing import Any

from miles_k3.types import Prompt

RESULTS: dict[str, Any] = {"none": None, "nan": float("nan"), "text": "0.5", "half": 0.5}


class OddGrader:
    def prepare(self) -> None:
        """Nothing to import."""

    def score(self, prompt: Prompt, text: str) -> Any:
        if prompt.answer == "never":
            time.sleep(3600)
        if prompt.answer == "length":
            return float(len(text))
        return RESULTS[prompt.answer]
