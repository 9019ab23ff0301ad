"""Generation in every mode: the loop, and what is kept between tokens."""
