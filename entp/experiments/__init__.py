"""Recipes: one file per figure or table of the paper. A recipe is data; importing one does nothing."""

RECIPES: dict[str, str] = {
    "count3": "entp.experiments.count3:RECIPE",
    "match3": "entp.experiments.match3:RECIPE",
}
"""Recipes by name and where they live."""
