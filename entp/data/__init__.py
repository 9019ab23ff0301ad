"""Text corpora: where they are found, how they are tokenized, prepared and read."""
