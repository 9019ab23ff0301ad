"""Techniques of training, each in a file of its own: to delete one, delete its file and its line
here."""

TECHNIQUES: dict[str, str] = {
    "batch_schedule": "entp.training.techniques.batch_schedule:BatchSchedule",
    "curriculum": "entp.training.techniques.curriculum:Curriculum",
    "random_targets": "entp.training.techniques.random_targets:RandomTargets",
    "importance": "entp.training.techniques.importance_sampling:ImportanceSampling",
    "ema": "entp.training.techniques.ema:Ema",
}
"""Field of a Run to the class that carries it out, in the order in which they act."""
