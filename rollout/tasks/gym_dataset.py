"""The reasoning-gym package behind one door: quiet import, strict parameters, an unbounded stream of questions."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from miles_k3.errors import ConfigError
from miles_k3.rollout.tasks.common import check_param_names, did_you_mean, stable_hash

if TYPE_CHECKING:
    from reasoning_gym.dataset import ProceduralDataset

# The package seeds question i of a dataset with seed + i, so datasets with neighbouring seeds overlap almost entirely;
# and some datasets can't be indexed beyond their size. Hence chunks of fixed size with hashed seeds.
CHUNK_QUESTIONS = 500
# Their questions follow the iteration order of sets of strings, which Python salts anew in each process.
HASH_DEPENDENT = frozenset(
    {
        "isomorphic_strings",
        "knight_swap",
        "list_functions",
        "polynomial_multiplication",
        "ransom_note",
        "word_ladder",
    }
)


def _datasets() -> dict[str, tuple[type, type]]:
    """Name -> (dataset class, config class)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # cellpylib compares strings with `is`
        import reasoning_gym  # noqa: F401
        from reasoning_gym.factory import DATASETS
    return {name: classes for name, classes in DATASETS.items() if name != "composite"}


def make_dataset(name: str, params: Mapping[str, Any], *, seed: int, size: int) -> ProceduralDataset:
    """The package's dataset. Raises ConfigError for unknown datasets and parameters and for values that it refuses."""
    known = _datasets()
    if name not in known:
        raise ConfigError(
            f"task.name is 'reasoning_gym:{name}', which the package doesn't have{did_you_mean(name, known)} "
            f"known: {', '.join(sorted(known))}"
        )
    dataset_class, config_class = known[name]
    fields = {f.name: f for f in dataclasses.fields(config_class) if f.name not in ("seed", "size")}
    check_param_names(f"reasoning_gym:{name}", params, fields)
    values = {key: _typed(key, value, fields[key]) for key, value in params.items()}
    try:
        return dataset_class(config_class(**values, seed=seed, size=size))
    except (AssertionError, TypeError, ValueError) as error:
        raise ConfigError(
            f"reasoning_gym:{name} refuses task.params {dict(params)}: {type(error).__name__}: {error}; "
            "its other parameters have the package's defaults"
        ) from error


def _typed(key: str, value: Any, field: dataclasses.Field[Any]) -> Any:
    """`value` if it has the type of a plain field; a YAML list becomes the tuple that the default is."""
    kind = field.type
    if kind in (int, float, bool, str, "int", "float", "bool", "str"):
        name = kind if isinstance(kind, str) else kind.__name__
        allowed = {"int": (int,), "float": (int, float), "bool": (bool,), "str": (str,)}[name]
        if type(value) not in allowed:
            raise ConfigError(f"task.params.{key} is {value!r} ({type(value).__name__}), expected {name}")
    return tuple(value) if isinstance(value, list) and isinstance(field.default, tuple) else value


class EntryStream:
    """Unbounded sequence of the package's entries, a pure function of (name, params, seed, label, index)."""

    def __init__(self, name: str, params: Mapping[str, Any], *, seed: int, label: str) -> None:
        self._source = (name, params)
        self._key = (seed, label)
        self._chunk = -1
        self._dataset: ProceduralDataset | None = None

    def __getitem__(self, index: int) -> dict[str, Any]:
        chunk, row = divmod(index, CHUNK_QUESTIONS)
        if chunk != self._chunk or self._dataset is None:
            name, params = self._source
            seed = stable_hash(*self._key, chunk) % 2**31  # numpy takes 32 bits, and the row is added
            self._dataset = make_dataset(name, params, seed=seed, size=CHUNK_QUESTIONS)
            self._chunk = chunk
        return self._dataset[row]
