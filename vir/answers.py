"""What a model says about an image."""

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Classes:
    """Class names with their probabilities, the most probable first."""

    image: str
    names: tuple[str, ...]
    probabilities: tuple[float, ...]

    @property
    def best(self) -> str:
        return self.names[0]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)
