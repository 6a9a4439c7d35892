"""The nouns: what is given and what is chosen."""
