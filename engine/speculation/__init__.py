"""Guesses at the next tokens of a sequence, which one step verifies together. Answers are the same without them."""
