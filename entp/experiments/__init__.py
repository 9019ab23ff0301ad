"""Recipes: one file per figure or table of the paper. A recipe is data; importing one trains
nothing."""

RECIPES: dict[str, str] = {
    "count3": "entp.experiments.recipes.count3:RECIPE",
    "count3-depth": "entp.experiments.recipes.count3_depth:RECIPE",
    "count3-longer": "entp.experiments.recipes.count3_depth:LONGER",
    "count3-rates": "entp.experiments.recipes.count3_rates:RECIPE",
    "match3": "entp.experiments.recipes.match3:RECIPE",
    "addition-samples": "entp.experiments.recipes.addition:RECIPE",
    "addition-rates": "entp.experiments.recipes.addition:RATES_RECIPE",
    "addition-tuned": "entp.experiments.recipes.addition:TUNED_RECIPE",
    "addition-lines": "entp.experiments.recipes.addition:LINES_RECIPE",
    "addition-length": "entp.experiments.recipes.addition_length:RECIPE",
    "addition-positions": "entp.experiments.recipes.addition_positions:RECIPE",
    "icl": "entp.experiments.recipes.icl:RECIPE",
    "icl-rates": "entp.experiments.recipes.icl:RATES_RECIPE",
    "icl-targets": "entp.experiments.recipes.icl:TARGETS_RECIPE",
    "icl-depth": "entp.experiments.recipes.icl_depth:RECIPE",
    "icl-shift": "entp.experiments.recipes.icl_shift:RECIPE",
    "openwebtext": "entp.experiments.recipes.text:RECIPE",
    "text-targets": "entp.experiments.recipes.text:TARGETS_RECIPE",
    "text-rates": "entp.experiments.recipes.text:RATES_RECIPE",
    "text-epochs": "entp.experiments.recipes.text:EPOCHS_RECIPE",
    "text-block": "entp.experiments.recipes.text:BLOCK_RECIPE",
    "clutrr": "entp.experiments.recipes.text_tasks:CLUTRR_RECIPE",
    "tinywinogrande": "entp.experiments.recipes.text_tasks:TINYWINOGRANDE_RECIPE",
    "winogrande": "entp.experiments.recipes.text_tasks:WINOGRANDE_RECIPE",
    "lambada": "entp.experiments.recipes.text_tasks:LAMBADA_RECIPE",
    "chase": "entp.experiments.recipes.chase:RECIPE",
}
"""Recipes by name and where they live."""
