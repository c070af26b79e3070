"""Complete runs as functions, listed by their names."""

from vir.train.recipes import classification, dense  # noqa: F401  (lists their recipes)
from vir.train.recipes.base import RECIPES, Decay, Precision, Recipe, at_size, plain, scaled

__all__ = ["RECIPES", "Decay", "Precision", "Recipe", "at_size", "plain", "scaled"]
