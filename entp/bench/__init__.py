"""What `entp bench step | generate | scaling` measures: time and memory, as ratios within one run
on one machine."""
