"""What the sections of a recipe are made of. Imports no torch."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


class Section(BaseModel):
    """Strict: unknown keys, text where a number belongs, infinities and later changes are all errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


PositiveInt = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(gt=0.0, le=1.0)]
Text = Annotated[str, Field(min_length=1)]
FolderName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.+=-]*$")]
